//! Lists of ids as people and the kernel write them: `0-3,8`.

use std::ops::RangeInclusive;

use super::set::{CpuSet, MAX_ID};
use crate::error::{Error, Result};
use crate::id::CpuId;

/// Reads a user's list of CPU or device ids, `0-3,8`; the order is kept.
///
/// `option` is what the caller calls the list, for example `--cpus`.
///
/// # Errors
/// [`Error::Invalid`] naming `option`, the element's number (from 1) and its text, for an empty
/// element, something that is no number, a reversed range, a duplicate, or an id above 1,048,575.
pub fn parse_id_list(option: &str, text: &str) -> Result<Vec<u32>> {
    let mut seen = CpuSet::new();
    let mut ids = Vec::new();
    each_range(text, |element, range| {
        for id in range {
            if !seen.insert(CpuId(id)) {
                return Err(format!(
                    "element {element} repeats {id}, which is already in the list"
                ));
            }
            ids.push(id);
        }
        Ok(())
    })
    .map_err(|message| Error::invalid(option, format!("{message} (in '{}')", shorten(text))))?;
    Ok(ids)
}

/// Calls `visit` with number (from 1) and range of each element of the list.
pub(super) fn each_range(
    text: &str,
    mut visit: impl FnMut(usize, RangeInclusive<u32>) -> Result<(), String>,
) -> Result<(), String> {
    // Ranges that overlap are no error in the kernel's lists, but they are visited anew each time.
    let mut left = MAX_ID + 1;
    for (element, part) in (1..).zip(text.split(',')) {
        let part = part.trim();
        let bad = |why: &str| format!("element {element}, '{}', {why}", shorten(part));
        let number = |digits: &str| {
            let digits = digits.trim();
            // `parse` alone would take "+1".
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                return Err(bad("is not a number or a range such as 0-3"));
            }
            let id = digits.parse::<u32>().ok().filter(|&id| id <= MAX_ID);
            id.ok_or_else(|| bad(&format!("is above the largest id, {MAX_ID}")))
        };
        if part.is_empty() {
            return Err(format!("element {element} is empty"));
        }
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last {
            return Err(bad(&format!("runs backwards; write {last}-{first}")));
        }
        left = left
            .checked_sub(last - first + 1)
            .ok_or_else(|| format!("more than {} ids up to element {element}", MAX_ID + 1))?;
        visit(element, first..=last)?;
    }
    Ok(())
}

/// At most 60 characters of a text, for an error message.
fn shorten(text: &str) -> String {
    let mut short: String = text.chars().take(60).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn order_is_kept() {
        assert_eq!(parse_id_list("--cpus", "8, 0-3,5").unwrap(), [8, 0, 1, 2, 3, 5]);
        assert_eq!(parse_id_list("--devices", "5,0").unwrap(), [5, 0]);
        assert_eq!(parse_id_list("--cpus", "7-7").unwrap(), [7]);
    }

    #[test]
    fn f7_ids_beyond_1024() {
        let ids = parse_id_list("--cpus", "1020-1030,2000").unwrap();
        assert_eq!((ids.len(), ids[10], ids[11]), (12, 1030, 2000));
        assert_eq!(parse_id_list("--cpus", "0-2000").unwrap().len(), 2001);
    }

    #[test]
    fn errors_name_option_place_and_text() {
        for (text, parts) in [
            ("", ["element 1", "empty"]),
            ("1,,2", ["element 2", "empty"]),
            ("1,2,", ["element 3", "empty"]),
            ("0-3,x", ["element 2", "'x'"]),
            ("0,+1", ["element 2", "'+1'"]),
            ("0,-1", ["element 2", "'-1'"]),
            ("4,3-1", ["element 2", "write 1-3"]),
            ("0-3,8,2", ["element 3", "repeats 2"]),
            ("0-3,1-5", ["element 2", "repeats 1"]),
            ("0-4294967295", ["element 1", "1048575"]),
            ("99999999999999999999", ["element 1", "1048575"]),
        ] {
            let error = parse_id_list("--rank1-cpus", text).unwrap_err();
            assert_eq!(error.kind(), "invalid");
            let error = error.to_string();
            assert!(error.starts_with("--rank1-cpus: "), "{error}");
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
        assert!(parse_id_list("--cpus", &"x".repeat(100_000)).unwrap_err().to_string().len() < 500);
    }

    proptest! {
        #[test]
        fn written_lists_are_read_back(ids in prop::collection::hash_set(0_u32..100_000, 1..50)) {
            let ids: Vec<u32> = ids.into_iter().collect();
            let text = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
            prop_assert_eq!(parse_id_list("ids", &text).unwrap(), ids);
        }
    }
}
