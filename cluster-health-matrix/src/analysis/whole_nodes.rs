//! Single CPUs and whole NUMA nodes: what is as its node is, is of the node.

use std::collections::BTreeSet;

use super::judge::{Confirmed, alike, pooled};
use super::suspect::{LEAST_NODE, Shape};
use super::table::Table;

/// The level of lines of an axis (the second number) at a size (the first) against the healthy ones.
pub(super) type Middle<'a> = &'a dyn Fn(usize, usize, &[usize]) -> Option<f64>;

/// Takes out single lines that are slow as their whole node is: as it was found to be, or as the lines
/// beside them are (`middle` of a size, an axis and lines).
pub(super) fn leave_to_nodes(table: &Table, found: &mut Vec<Confirmed>, middle: Middle<'_>) {
    let all = found.clone();
    found.retain(|confirmed| {
        let Shape::Lines { axis, members, node: None } = &confirmed.shape else { return true };
        if *axis == 1 && !table.sweep.is_pair() {
            return true;
        }
        let [line] = members[..] else { return true };
        let Some(own) = confirmed.by_size[confirmed.size] else { return true };
        let of_node = all.iter().find_map(|other| match &other.shape {
            Shape::Lines { axis: other_axis, members, node: Some(_) }
                if other_axis == axis && members.contains(&line) =>
            {
                other.by_size[confirmed.size]
            }
            _ => None,
        });
        let of_node = of_node.map(|node| node.effect).or_else(|| {
            let nodes = table.nodes(*axis);
            let mut mates = nodes.into_values().find(|members| members.contains(&line))?;
            let is_alone = |at: &usize| {
                !all.iter().any(|other| {
                    matches!(&other.shape, Shape::Lines { axis: of, members, node: None }
                        if of == axis && members == &[*at])
                })
            };
            mates.retain(is_alone);
            middle(confirmed.size, *axis, &mates)
        });
        // A node that is hardly slow leaves a line its own.
        of_node
            .is_none_or(|node| node < own.effect / 2.0 || own.effect - node > confirmed.threshold)
    });
}

/// Groups of single lines that are all lines of their nodes are these nodes, and those that are as other
/// nodes are belong to these.
pub(super) fn make_nodes(table: &Table, groups: &mut Vec<Vec<Confirmed>>, spread: [f64; 2]) {
    // A device's node says where it is plugged in, not what it is.
    let axes = if table.sweep.is_pair() { 2 } else { 1 };
    for (axis, spread) in spread.into_iter().enumerate().take(axes) {
        let nodes = table.nodes(axis);
        let is_of = |group: &[Confirmed], wants_node: bool| {
            group.iter().all(|own| match own.shape {
                Shape::Lines { axis: of, node, .. } => of == axis && node.is_some() == wants_node,
                _ => false,
            })
        };
        let mut at = 0;
        while at < groups.len() {
            let lines: BTreeSet<usize> = groups[at]
                .iter()
                .flat_map(|own| match &own.shape {
                    Shape::Lines { members, .. } => members.clone(),
                    _ => Vec::new(),
                })
                .collect();
            let touched: Vec<(u32, &Vec<usize>)> = nodes
                .iter()
                .filter(|(_, members)| members.iter().any(|line| lines.contains(line)))
                .map(|(node, members)| (*node, members))
                .collect();
            let is_whole = touched.len() < nodes.len()
                && touched.iter().map(|(_, members)| members.len()).sum::<usize>() == lines.len();
            if !is_of(&groups[at], false) || !is_whole {
                at += 1;
                continue;
            }
            let healthy = 4.0 * spread;
            let same = groups.iter().position(|other| {
                is_of(other, true)
                    && other
                        .iter()
                        .any(|a| groups[at].iter().all(|b| alike(&a.by_size, &b.by_size, healthy)))
            });
            // Few lines of a node are single CPUs, unless another node is as they are.
            if same.is_none() && touched.iter().any(|(_, members)| members.len() < LEAST_NODE) {
                at += 1;
                continue;
            }
            let of_nodes: Vec<Confirmed> = touched
                .into_iter()
                .map(|(node, members)| {
                    let own: Vec<Confirmed> = groups[at]
                        .iter()
                        .filter(|own| match &own.shape {
                            Shape::Lines { members: own, .. } => members.contains(&own[0]),
                            _ => false,
                        })
                        .cloned()
                        .collect();
                    let by_size =
                        (0..own[0].by_size.len()).map(|size| pooled(&own, size)).collect();
                    let shape = Shape::Lines { axis, members: members.clone(), node: Some(node) };
                    Confirmed { shape, by_size, ..own[0].clone() }
                })
                .collect();
            match same {
                Some(same) => {
                    groups[same].extend(of_nodes);
                    groups.remove(at);
                }
                None => {
                    groups[at] = of_nodes;
                    at += 1;
                }
            }
        }
    }
}
