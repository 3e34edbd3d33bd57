//! A sampled sweep: a few cells first, then those that decide most, and what is suspicious six times
//! more, within a budget of machine time.
//!
//! What is decided by time is decided by rank 0 from the log's own times, so that ranks agree and a run
//! that goes on comes to the same cells.

use cluster_health_core::ByteSize;

use super::SweepEnd;
use super::engine::{Drive, Extent, Points};
use crate::analysis::{Kinship, sampled_confirmation, sampled_error, sampled_next};
use crate::error::{Error, Result};
use crate::plan::Sampling;
use crate::samples::Phase;
use crate::schedule::{Blocks, Cell, Random, all_sizes};

/// Shares of the budget until which cells are chosen by chance, and by what they would decide; the
/// rest is for confirming.
const BASE_SHARE: f64 = 0.5;
const SEEKING_SHARE: f64 = 0.72;
/// Of the base: the sizes that are not looked at closely.
const OTHER_SIZES_SHARE: f64 = 0.2;
/// Cells from which the time of points is known.
const PILOT: usize = 8;
/// Kept free, because the time of a point is an estimate.
const MARGIN: f64 = 0.98;
/// Points between two looks at the time.
const STRETCH: usize = 48;
/// Parts of the base, after each of which the wanted precision may be reached.
const PORTIONS: usize = 8;
/// Times that cells are chosen by what they would decide.
const MOST_STEPS: usize = 4;
/// Cells of a class of pairs.
const ENOUGH_OF_CLASS: usize = 16;

/// What is looked for in which cells.
struct Field<'a> {
    /// Usable rows and columns.
    lines: [Vec<usize>; 2],
    /// Cells whose CPUs share a core, and a CPU: too few to be met by chance.
    classes: [Vec<Cell>; 2],
    sizes: &'a [ByteSize],
    budget_ns: u64,
    is_pair: bool,
}

/// Measures (or recalls) a sampled sweep.
pub(super) fn sampled<P: Points, B: Blocks>(
    mut run: Drive<'_, '_, P>,
    schedule: &mut B,
    extent: Extent,
    sample: Sampling,
) -> Result<SweepEnd> {
    match measure(&mut run, schedule, extent, sample) {
        Ok(true) => run.finish(),
        // This rank was asked to end, or another one.
        Ok(false) | Err(Error::Cancelled) => Ok(run.cancelled()),
        Err(error) => Err(error),
    }
}

/// False when the sweep was asked to end before.
fn measure<P: Points, B: Blocks>(
    run: &mut Drive<'_, '_, P>,
    schedule: &mut B,
    extent: Extent,
    sample: Sampling,
) -> Result<bool> {
    let Some(table) = run.gathered.first().and_then(|load| load.table.as_ref()) else {
        return Ok(true);
    };
    let shape = table.shape();
    let is_usable = |row: usize, column: usize| run.points.is_usable(Cell { row, column });
    let lines = [
        (0..shape[0]).filter(|&row| (0..shape[1]).any(|col| is_usable(row, col))).collect(),
        (0..shape[1]).filter(|&col| (0..shape[0]).any(|row| is_usable(row, col))).collect(),
    ];
    let sizes = schedule.sizes().to_vec();
    let classes = [Kinship::Siblings, Kinship::SameCpu].map(|kinship| {
        let cells = table.cells_of(kinship).map(|(row, column)| Cell { row, column });
        cells.filter(|cell| run.points.is_usable(*cell)).collect()
    });
    let field = Field {
        lines,
        classes,
        sizes: &sizes,
        budget_ns: sample.budget_ns,
        is_pair: table.sweep.is_pair(),
    };
    let mut random = Random::new(extent.seed ^ 0x7361_6d70);

    schedule.begin_block();
    let base = BASE_SHARE * field.budget();
    for visit in field.pilot(&mut random) {
        let Some(_) = run.visits(schedule, vec![visit], Phase::Blocks, base, &field)? else {
            return Ok(false);
        };
    }
    run.spent.settle();
    let cells = field.lines[0].len() * field.lines[1].len();
    let costs: Vec<f64> = sizes.iter().map(|&bytes| run.cost(bytes)).collect();
    let full = costs.iter().sum::<f64>() * to_f64(cells);
    let blocks = run.decide(base / full.max(1.0))?.min(extent.repeats as usize);
    let typical: Vec<u64> = sizes.iter().map(|&bytes| run.spent.typical(bytes)).collect();
    let main = run.decide(to_f64(field.main_size(&typical)))?;
    if blocks > 0 {
        // A small machine: everything fits.
        for block in 0..blocks {
            if block > 0 {
                schedule.begin_block();
            }
            let visits = all_sizes(&field.all(), &sizes);
            let limit = SEEKING_SHARE * field.budget();
            match run.visits(schedule, visits, Phase::Blocks, limit, &field)? {
                None => return Ok(false),
                Some(false) => break,
                Some(true) => {}
            }
        }
    } else {
        let others = if sizes.len() > 1 { OTHER_SIZES_SHARE } else { 0.0 };
        let room = ((1.0 - others) * base - run.spent_ns()) / costs[main].max(1.0);
        let count = run.decide(room.max(1.0))?;
        let mut visits: Vec<(Cell, ByteSize)> = field
            .spread(if 10 * count > 9 * cells { cells } else { count }, &mut random)
            .into_iter()
            .map(|cell| (cell, sizes[main]))
            .collect();
        for class in &field.classes {
            let mut class = class.clone();
            random.shuffle(&mut class);
            class.truncate(ENOUGH_OF_CLASS);
            visits.extend(class.into_iter().map(|cell| (cell, sizes[main])));
        }
        visits.sort_unstable();
        visits.dedup();
        for (size, &bytes) in sizes.iter().enumerate().filter(|(size, _)| *size != main) {
            let share = others * base / to_f64(sizes.len() - 1);
            let count = run.decide(share / costs[size].max(1.0))?.max(4);
            visits.extend(
                field.spread(count.min(cells), &mut random).into_iter().map(|c| (c, bytes)),
            );
        }
        let limit = SEEKING_SHARE * field.budget();
        random.shuffle(&mut visits);
        let portions = if sample.target.is_some() { PORTIONS } else { 1 };
        for portion in visits.chunks(visits.len().div_ceil(portions).max(1)) {
            let portion = portion.to_vec();
            let Some(_) = run.visits(schedule, portion, Phase::Blocks, limit, &field)? else {
                return Ok(false);
            };
            let table = run.gathered.first().and_then(|load| load.table.as_ref());
            // Looked at only where it decides something.
            if let (Some(target), Some(table)) = (sample.target, table)
                && sampled_error(table, main) <= target
            {
                break;
            }
        }
        for _ in 0..MOST_STEPS {
            let table = run.gathered.first().and_then(|load| load.table.as_ref());
            let min_effect = extent.confirm.unwrap_or(crate::plan::DEFAULT_MIN_EFFECT);
            let usable = |row: usize, column: usize| run.points.is_usable(Cell { row, column });
            let next =
                table.and_then(|table| sampled_next(table, main, min_effect, &usable, &mut random));
            let Some(mut next) = next.filter(|next| !next.is_empty()) else { break };
            let room = (limit - run.spent_ns()).max(0.0) / costs[main].max(1.0);
            let most = run.decide(room)?;
            next.truncate(most);
            if next.is_empty() {
                break;
            }
            schedule.begin_block();
            let visits = next.into_iter().map(|cell| (cell, sizes[main])).collect();
            match run.visits(schedule, visits, Phase::Blocks, limit, &field)? {
                None => return Ok(false),
                Some(false) => break,
                Some(true) => {}
            }
        }
    }
    if let Some(min_effect) = extent.confirm
        && let Some(table) = run.gathered.first().and_then(|load| load.table.clone())
    {
        let limit = MARGIN * field.budget();
        // Where there is time for little, two sizes tell whether an effect grows with the bytes.
        let mut confirmed = sizes.clone();
        if blocks == 0 {
            confirmed.retain(|bytes| *bytes == sizes[main] || Some(bytes) == sizes.last());
        }
        let of_sizes: u64 = confirmed.iter().map(|&bytes| run.spent.of_point(bytes)).sum();
        let of_sizes = usize::try_from(run.agree(of_sizes)?).unwrap_or(usize::MAX).max(1);
        let of_main = run.agree(run.spent.of_point(sizes[main]))?;
        let of_main = usize::try_from(of_main).unwrap_or(usize::MAX).max(1);
        let room = run.decide(limit - run.spent_ns())?;
        let usable = |row: usize, column: usize| run.points.is_usable(Cell { row, column });
        let fits = |cells: usize, both: bool| {
            cells.saturating_mul(if both { of_sizes } else { of_main }) < room
        };
        let (rounds, both) = sampled_confirmation(table, min_effect, extent.seed, &usable, &fits);
        if !both {
            confirmed = vec![sizes[main]];
        }
        for cells in rounds {
            schedule.begin_block();
            let visits = all_sizes(&cells, &confirmed);
            match run.visits(schedule, visits, Phase::Confirm, limit, &field)? {
                None => return Ok(false),
                Some(false) => break,
                Some(true) => {}
            }
        }
    }
    Ok(true)
}

impl Field<'_> {
    #[allow(clippy::cast_precision_loss, reason = "a share of it is taken")]
    const fn budget(&self) -> f64 {
        self.budget_ns as f64
    }

    /// A few cells of every size, from which the time of points is known.
    fn pilot(&self, random: &mut Random) -> Vec<(Cell, ByteSize)> {
        all_sizes(&self.spread(PILOT, random), self.sizes)
    }

    fn all(&self) -> Vec<Cell> {
        let [rows, cols] = &self.lines;
        rows.iter().flat_map(|&row| cols.iter().map(move |&column| Cell { row, column })).collect()
    }

    /// So many cells, as evenly over rows and columns as their number allows; those that share a CPU
    /// or a core come by chance.
    fn spread(&self, count: usize, random: &mut Random) -> Vec<Cell> {
        let [rows, cols] = &self.lines;
        let all = rows.len() * cols.len();
        if count >= all {
            return self.all();
        }
        let mut chosen = std::collections::BTreeSet::new();
        let mut orders = [rows.clone(), cols.clone()];
        let most = rows.len().max(cols.len());
        while chosen.len() < count {
            orders.iter_mut().for_each(|order| random.shuffle(order));
            let left = count - chosen.len();
            for at in 0..most.min(left) {
                let (row, column) = (orders[0][at % rows.len()], orders[1][at % cols.len()]);
                chosen.insert(Cell { row, column });
            }
        }
        chosen.into_iter().collect()
    }

    /// The size that tells most about a link in a given time: the smallest of those whose time is
    /// mostly that of their bytes.
    fn main_size(&self, times: &[u64]) -> usize {
        #[allow(clippy::cast_precision_loss, reason = "a comparison of times")]
        let costs: Vec<f64> = times.iter().map(|&time| time as f64).collect();
        let (first, last) = (0, self.sizes.len() - 1);
        if first == last {
            return 0;
        }
        let bytes = |size: usize| to_f64(usize::try_from(self.sizes[size].bytes()).unwrap_or(0));
        // The largest size's time per byte; what smaller ones take beyond it is fixed.
        let per_byte = (costs[last] - costs[first]) / (bytes(last) - bytes(first));
        let worth = |size: usize| {
            let share = (per_byte * bytes(size) / costs[size].max(1.0)).clamp(0.0, 1.0);
            share * share / costs[size].max(1.0)
        };
        (first..=last).max_by(|&a, &b| worth(a).total_cmp(&worth(b))).unwrap_or(last)
    }
}

impl<P: Points> Drive<'_, '_, P> {
    #[allow(clippy::cast_precision_loss, reason = "a share of it is taken")]
    fn spent_ns(&self) -> f64 {
        self.spent.total_ns() as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "a share of it is taken")]
    fn cost(&self, bytes: ByteSize) -> f64 {
        self.spent.of_point(bytes) as f64
    }

    /// Rank 0's number, rounded down.
    fn decide(&mut self, own: f64) -> Result<usize> {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let own = own.clamp(0.0, 1e15) as u64;
        Ok(usize::try_from(self.agree(own)?).unwrap_or(usize::MAX))
    }

    /// Makes these visits in fresh order, as long as the time allows; `None` when the sweep was asked
    /// to end, false when the time was up.
    fn visits<B: Blocks>(
        &mut self,
        schedule: &mut B,
        mut visits: Vec<(Cell, ByteSize)>,
        phase: Phase,
        limit_ns: f64,
        field: &Field<'_>,
    ) -> Result<Option<bool>> {
        visits.sort_unstable();
        // Visits to a core stay together, pairs do not.
        let mut groups: Vec<Vec<(Cell, ByteSize)>> = if field.is_pair {
            visits.into_iter().map(|visit| vec![visit]).collect()
        } else {
            visits.chunk_by(|a, b| a.0.row == b.0.row).map(<[_]>::to_vec).collect()
        };
        schedule.shuffle(&mut groups);
        let mut waiting = groups.into_iter();
        while waiting.len() > 0 {
            let mut stretch = Vec::new();
            self.expect(waiting.len());
            while stretch.len() < STRETCH
                && let Some(group) = waiting.next()
            {
                stretch.extend(group);
            }
            let cost: f64 = stretch.iter().map(|(_, bytes)| self.cost(*bytes)).sum();
            // The clock itself only stops what is far from what was expected.
            let is_late = self.spent.clock_ns() > field.budget_ns;
            if self.agree(u64::from(self.spent_ns() + cost <= limit_ns && !is_late))? == 0 {
                return Ok(Some(false));
            }
            if !self.measure_all(schedule.visit(stretch, phase))? {
                return Ok(None);
            }
        }
        Ok(Some(true))
    }
}

#[allow(clippy::cast_precision_loss, reason = "counts of cells")]
fn to_f64(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests;
