//! A set of CPUs without an upper limit of 1,024.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::list::each_range;
use crate::error::{Error, Result};
use crate::id::CpuId;

/// A set of CPUs: a bitmap that grows as needed.
///
/// Prints, parses and serialises as a kernel CPU list (`0-3,8`; empty set = empty text).
#[derive(Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct CpuSet {
    // The last word is never 0, so that equal sets have equal words.
    words: Vec<u64>,
}

/// Largest CPU id that text may name: far above any kernel's limit, and a bitmap of 128 KiB.
pub(crate) const MAX_ID: u32 = (1 << 20) - 1;

/// Word and bit of a CPU in a mask of 64-bit words.
pub(crate) fn locate(cpu: CpuId) -> (usize, u64) {
    (usize::try_from(cpu.0 / 64).unwrap_or(usize::MAX), 1 << (cpu.0 % 64))
}

impl CpuSet {
    /// The empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self { words: Vec::new() }
    }

    /// Adds a CPU; false when it was there already. The bitmap takes one bit for each smaller id.
    pub fn insert(&mut self, cpu: CpuId) -> bool {
        let (word, bit) = locate(cpu);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        new
    }

    /// Takes a CPU out; false when it was not there.
    pub fn remove(&mut self, cpu: CpuId) -> bool {
        let (word, bit) = locate(cpu);
        let had = self.contains(cpu);
        if had {
            self.words[word] &= !bit;
            self.trim();
        }
        had
    }

    /// Whether the CPU is in the set.
    #[must_use]
    pub fn contains(&self, cpu: CpuId) -> bool {
        let (word, bit) = locate(cpu);
        self.words.get(word).is_some_and(|w| w & bit != 0)
    }

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = CpuId> {
        (0_u32..).zip(&self.words).flat_map(|(index, &word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| CpuId(index * 64 + bit))
        })
    }

    /// The number of CPUs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| usize::try_from(word.count_ones()).unwrap_or_default()).sum()
    }

    /// Whether there is no CPU in the set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The smallest CPU id.
    #[must_use]
    pub fn first(&self) -> Option<CpuId> {
        self.iter().next()
    }

    /// CPUs of either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a | b)
    }

    /// CPUs of both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a & b)
    }

    /// CPUs of this set that are not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        self.combine(other, |a, b| a & !b)
    }

    /// Reads a kernel CPU list such as `0-3,8`; white space and empty text are fine, as sysfs
    /// files end in a newline and a memory-only node's list is nothing else.
    ///
    /// # Errors
    /// [`Error::Format`] for anything else, a reversed range, or an id above 1,048,575.
    pub fn parse_kernel_list(text: &str) -> Result<Self> {
        Self::from_kernel_list(text).map_err(|message| Error::format("CPU list", message))
    }

    pub(crate) fn from_kernel_list(text: &str) -> Result<Self, String> {
        let mut set = Self::new();
        if !text.trim().is_empty() {
            each_range(text, |_, range| {
                set.extend(range.map(CpuId));
                Ok(())
            })?;
        }
        Ok(set)
    }

    /// Reads a kernel mask: groups of 32 bits in hexadecimal, the highest first (`00ff,00000001`).
    pub(crate) fn from_kernel_mask(text: &str) -> Result<Self, String> {
        let mut set = Self::new();
        for (index, group) in (0_u32..).zip(text.trim().rsplit(',')) {
            let group = group.trim();
            let bits = if group.is_empty() { Ok(0) } else { u32::from_str_radix(group, 16) };
            let bits = bits.map_err(|_| format!("'{group}' is no group of a CPU mask"))?;
            for bit in (0..32).filter(|bit| bits >> bit & 1 == 1) {
                let id = index * 32 + bit;
                if id > MAX_ID {
                    return Err(format!("CPU {id} is above the limit of {MAX_ID}"));
                }
                set.insert(CpuId(id));
            }
        }
        Ok(set)
    }

    pub(crate) fn from_words(words: &[u64]) -> Self {
        let mut set = Self { words: words.to_vec() };
        set.trim();
        set
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    fn combine(&self, other: &Self, op: impl Fn(u64, u64) -> u64) -> Self {
        let word = |set: &Self, index| set.words.get(index).copied().unwrap_or_default();
        let len = self.words.len().max(other.words.len());
        let mut set = Self {
            words: (0..len).map(|index| op(word(self, index), word(other, index))).collect(),
        };
        set.trim();
        set
    }

    fn trim(&mut self) {
        let len = self.words.iter().rposition(|&word| word != 0).map_or(0, |last| last + 1);
        self.words.truncate(len);
    }
}

impl Extend<CpuId> for CpuSet {
    fn extend<I: IntoIterator<Item = CpuId>>(&mut self, cpus: I) {
        for cpu in cpus {
            self.insert(cpu);
        }
    }
}

impl FromIterator<CpuId> for CpuSet {
    fn from_iter<I: IntoIterator<Item = CpuId>>(cpus: I) -> Self {
        let mut set = Self::new();
        set.extend(cpus);
        set
    }
}

/// Kernel list: `0-3,8`.
impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().map(|cpu| cpu.0).peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

impl From<CpuSet> for String {
    fn from(set: CpuSet) -> Self {
        set.to_string()
    }
}

impl TryFrom<String> for CpuSet {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        Self::parse_kernel_list(&text)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse_kernel_list(text).unwrap()
    }

    fn ids(set: &CpuSet) -> Vec<u32> {
        set.iter().map(|cpu| cpu.0).collect()
    }

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(ids(&set("0-3,8\n")), [0, 1, 2, 3, 8]);
        assert_eq!(ids(&set(" 5 , 1-2 \n")), [1, 2, 5]);
        for empty in ["", "\n", "  \n"] {
            assert!(set(empty).is_empty());
            assert_eq!(set(empty).to_string(), "");
        }
        for bad in ["a", "1,,2", "1,", "3-1", "-1", "1-", "+1", "0x1", "1-2-3", "4294967296"] {
            assert!(CpuSet::parse_kernel_list(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_huge_id_is_an_error_not_an_allocation() {
        assert_eq!(set("1048575").first(), Some(CpuId(1_048_575)));
        for bad in ["1048576", "0-4294967295", "4294967295"] {
            let error = CpuSet::parse_kernel_list(bad).unwrap_err().to_string();
            assert!(error.contains("1048575"), "{error}");
        }
    }

    #[test]
    fn a_list_cannot_name_the_same_ids_for_hours() {
        assert_eq!(set("0-1048575").len(), 1_048_576);
        assert_eq!(set("0-3,2-5").len(), 6);
        let long = "0-1048575,".repeat(100_000) + "5";
        let error = CpuSet::parse_kernel_list(&long).unwrap_err().to_string();
        assert!(error.contains("more than 1048576 ids up to element 2"), "{error}");
    }

    #[test]
    fn f7_sets_grow_beyond_1024() {
        let wide = set("1020-1030,2000");
        assert_eq!(wide.len(), 12);
        assert!(wide.contains(CpuId(1024)) && wide.contains(CpuId(2000)));
        assert!(!wide.contains(CpuId(1999)) && !wide.contains(CpuId(5000)));
        assert_eq!(wide.to_string(), "1020-1030,2000");
        assert_eq!(set("0-2000").len(), 2001);
        assert_eq!(set("0-2000").intersection(&wide), wide);
    }

    #[test]
    fn masks_are_groups_of_32_bits() {
        let mask = |text| ids(&CpuSet::from_kernel_mask(text).unwrap());
        assert_eq!(mask("00000000,00000101\n"), [0, 8]);
        assert_eq!(mask("0011,11111111"), [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]);
        assert_eq!(mask("1,,00000001"), [0, 64]);
        assert!(mask("0").is_empty());
        assert!(CpuSet::from_kernel_mask("zz").is_err());
        assert!(CpuSet::from_kernel_mask(&format!("1{}", ",0".repeat(1 << 15))).is_err());
    }

    #[test]
    fn equal_sets_are_equal_whatever_was_removed() {
        let mut shrunk = set("1,700");
        assert!(shrunk.remove(CpuId(700)) && !shrunk.remove(CpuId(700)));
        assert_eq!(shrunk, set("1"));
        assert!(set("3").difference(&set("3")).is_empty());
    }

    #[test]
    fn serialises_as_a_list() {
        let text = serde_json::to_string(&set("0,1,2,8")).unwrap();
        assert_eq!(text, "\"0-2,8\"");
        assert_eq!(serde_json::from_str::<CpuSet>(&text).unwrap(), set("0-2,8"));
    }

    proptest! {
        #[test]
        fn behaves_like_an_ordered_set(
            a in prop::collection::btree_set(0_u32..3000, 0..60),
            b in prop::collection::btree_set(0_u32..3000, 0..60),
        ) {
            let of = |ids: &BTreeSet<u32>| ids.iter().copied().map(CpuId).collect::<CpuSet>();
            let (x, y) = (of(&a), of(&b));
            prop_assert_eq!(ids(&x), a.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(x.len(), a.len());
            prop_assert_eq!(x.first().map(|cpu| cpu.0), a.first().copied());
            prop_assert_eq!(CpuSet::parse_kernel_list(&x.to_string()).unwrap(), x.clone());
            prop_assert_eq!(x.union(&y), of(&a.union(&b).copied().collect()));
            prop_assert_eq!(x.intersection(&y), of(&a.intersection(&b).copied().collect()));
            prop_assert_eq!(x.difference(&y), of(&a.difference(&b).copied().collect()));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9,\\- \n]{0,12}|.{0,40}") {
            if let Ok(read) = CpuSet::parse_kernel_list(&text) {
                prop_assert_eq!(set(&read.to_string()), read);
            }
            drop(CpuSet::from_kernel_mask(&text));
        }
    }
}
