//! Reading lines of a log as this library writes them: no blanks, the fields in their order.
//!
//! A log has a line per point, and reading it is most of the work of a report. A line that looks any
//! other way is left to the general parser, so that both agree on every line.

use std::collections::BTreeMap;

use cluster_health_core::{ByteSize, CpuId, DeviceId};

use crate::samples::{DataCheck, Phase, Pinned, PointStatus, RanOn, Sample, Sweep, Timer};

/// Reads a line with its end into `into`, whose room it uses again; `None` where the general parser has
/// to look at it, and `into` is then half of this and half of that.
pub(crate) fn parse(line: &[u8], into: &mut Sample) -> Option<()> {
    let mut at = Cursor(line);
    at.skip(b"{\"seq\":")?;
    into.seq = at.number()?;
    at.skip(b",\"t_ns\":")?;
    into.t_ns = at.or_null(Cursor::number)?;
    at.skip(b",\"sweep\":")?;
    into.sweep = match at.word()? {
        "h2d" => Sweep::H2d,
        "d2h" => Sweep::D2h,
        "bidirectional" => Sweep::Bidirectional,
        "core_pair" => Sweep::CorePair,
        _ => return None,
    };
    at.skip(b",\"load\":")?;
    at.word()?.clone_into(&mut into.load);
    at.skip(b",\"block\":")?;
    into.block = at.small()?;
    into.cpu = at.field(b",\"cpu\":", Cursor::cpu)?;
    into.device = at.field(b",\"device\":", Cursor::device)?;
    into.rank0_cpu = at.field(b",\"rank0_cpu\":", Cursor::cpu)?;
    into.rank1_cpu = at.field(b",\"rank1_cpu\":", Cursor::cpu)?;
    into.device_pair = at.field(b",\"device_pair\":", Cursor::device_pair)?;
    at.skip(b",\"bytes\":")?;
    into.bytes = ByteSize(at.number()?);
    at.skip(b",\"status\":")?;
    into.status = match at.word()? {
        "measured" => PointStatus::Measured,
        "skipped" => PointStatus::Skipped,
        "failed" => PointStatus::Failed,
        "implausible" => PointStatus::Implausible,
        _ => return None,
    };
    at.skip(b",\"reason\":")?;
    into.reason = at.or_null(|at| at.word().map(str::to_owned))?;
    at.skip(b",\"iter_ns\":")?;
    at.numbers(&mut into.iter_ns)?;
    at.skip(b",\"host_iter_ns\":")?;
    if at.skip(b"null").is_some() {
        into.host_iter_ns = None;
    } else {
        at.numbers(into.host_iter_ns.get_or_insert_default())?;
    }
    at.skip(b",\"timer\":")?;
    into.timer = match at.word()? {
        "host" => Timer::Host,
        "event" => Timer::Event,
        "event_batch" => Timer::EventBatch,
        _ => return None,
    };
    if at.skip(b",\"rank_ns\":").is_some() {
        at.list(into.rank_ns.get_or_insert_default(), Vec::new, Cursor::numbers)?;
    } else {
        into.rank_ns = None;
    }
    at.skip(b",\"warmup_ns\":")?;
    at.numbers(&mut into.warmup_ns)?;
    at.skip(b",\"touch_ns\":")?;
    into.touch_ns = at.number()?;
    at.skip(b",\"bind_ns\":")?;
    into.bind_ns = at.number()?;
    at.skip(b",\"pinned\":")?;
    into.pinned = at.or_null(|at| match at.word()? {
        "pinned" => Some(Pinned::Pinned),
        "registered" => Some(Pinned::Registered),
        "pageable" => Some(Pinned::Pageable),
        _ => None,
    })?;
    at.skip(b",\"page_nodes\":")?;
    into.page_nodes = at.or_null(Cursor::pages)?;
    at.skip(b",\"ran_on\":")?;
    at.ran_on(&mut into.ran_on)?;
    at.skip(b",\"sentinel\":")?;
    into.sentinel = at.flag()?;
    at.skip(b",\"phase\":")?;
    into.phase = match at.word()? {
        "blocks" => Phase::Blocks,
        "probe" => Phase::Probe,
        "confirm" => Phase::Confirm,
        _ => return None,
    };
    at.skip(b",\"arena\":")?;
    into.arena = at.or_null(Cursor::small)?;
    at.skip(b",\"settled\":")?;
    into.settled = at.flag()?;
    into.skew_ns = at.field(b",\"skew_ns\":", Cursor::number)?;
    at.skip(b",\"check\":")?;
    into.check = match at.word()? {
        "ok" => DataCheck::Ok,
        "mismatch" => DataCheck::Mismatch,
        "off" => DataCheck::Off,
        _ => return None,
    };
    at.skip(b"}\n")?;
    at.0.is_empty().then_some(())
}

/// What is left of a line. Everything is `None` at the first byte that is not expected.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn skip(&mut self, text: &[u8]) -> Option<()> {
        self.0 = self.0.strip_prefix(text)?;
        Some(())
    }

    /// A field that may be missing.
    fn field<T>(
        &mut self,
        name: &[u8],
        value: impl FnOnce(&mut Self) -> Option<T>,
    ) -> Option<Option<T>> {
        if self.skip(name).is_none() {
            return Some(None);
        }
        value(self).map(Some)
    }

    fn or_null<T>(&mut self, value: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        if self.skip(b"null").is_some() {
            return Some(None);
        }
        value(self).map(Some)
    }

    /// Digits without a sign, a fraction or leading zeros; what follows them is the next one's.
    fn number(&mut self) -> Option<u64> {
        let count = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = self.0.split_at_checked(count)?;
        // 19 digits always fit.
        if count == 0 || count > 19 || (count > 1 && digits[0] == b'0') {
            return None;
        }
        self.0 = rest;
        Some(digits.iter().fold(0, |value, digit| 10 * value + u64::from(digit - b'0')))
    }

    fn small(&mut self) -> Option<u32> {
        u32::try_from(self.number()?).ok()
    }

    fn cpu(&mut self) -> Option<CpuId> {
        self.small().map(CpuId)
    }

    fn device(&mut self) -> Option<DeviceId> {
        self.small().map(DeviceId)
    }

    /// A string of printable ASCII without escapes.
    fn word(&mut self) -> Option<&'a str> {
        self.skip(b"\"")?;
        let plain = |byte: &u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
        let count = self.0.iter().take_while(|byte| plain(byte)).count();
        let (word, rest) = self.0.split_at_checked(count)?;
        self.0 = rest.strip_prefix(b"\"")?;
        std::str::from_utf8(word).ok()
    }

    fn flag(&mut self) -> Option<bool> {
        if self.skip(b"true").is_some() {
            return Some(true);
        }
        self.skip(b"false").map(|()| false)
    }

    /// `item` finds the item that stood there before, or a blank one.
    fn list<T>(
        &mut self,
        items: &mut Vec<T>,
        blank: fn() -> T,
        mut item: impl FnMut(&mut Self, &mut T) -> Option<()>,
    ) -> Option<()> {
        self.skip(b"[")?;
        let mut count = 0;
        if self.skip(b"]").is_none() {
            loop {
                if count == items.len() {
                    items.push(blank());
                }
                item(self, &mut items[count])?;
                count += 1;
                if self.skip(b",").is_none() {
                    self.skip(b"]")?;
                    break;
                }
            }
        }
        items.truncate(count);
        Some(())
    }

    fn numbers(&mut self, numbers: &mut Vec<u64>) -> Option<()> {
        self.list(numbers, u64::default, |at, number| {
            *number = at.number()?;
            Some(())
        })
    }

    fn cpus(&mut self, cpus: &mut Vec<CpuId>) -> Option<()> {
        self.list(
            cpus,
            || CpuId(0),
            |at, cpu| {
                *cpu = at.cpu()?;
                Some(())
            },
        )
    }

    fn device_pair(&mut self) -> Option<[DeviceId; 2]> {
        self.skip(b"[")?;
        let first = self.device()?;
        self.skip(b",")?;
        let second = self.device()?;
        self.skip(b"]").map(|()| [first, second])
    }

    fn ran_on(&mut self, ran_on: &mut RanOn) -> Option<()> {
        if self.0.starts_with(b"[[") {
            if !matches!(ran_on, RanOn::Ranks(_)) {
                *ran_on = RanOn::Ranks(Vec::new());
            }
        } else if !matches!(ran_on, RanOn::Thread(_)) {
            *ran_on = RanOn::Thread(Vec::new());
        }
        match ran_on {
            RanOn::Ranks(ranks) => self.list(ranks, Vec::new, Self::cpus),
            RanOn::Thread(cpus) => self.cpus(cpus),
        }
    }

    /// Pages by NUMA node.
    fn pages(&mut self) -> Option<BTreeMap<u32, u32>> {
        self.skip(b"{")?;
        let mut pages = BTreeMap::new();
        if self.skip(b"}").is_some() {
            return Some(pages);
        }
        loop {
            self.skip(b"\"")?;
            let node = self.small()?;
            self.skip(b"\":")?;
            pages.insert(node, self.small()?);
            if self.skip(b",").is_none() {
                return self.skip(b"}").map(|()| pages);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(sample: &Sample) -> Vec<u8> {
        let mut line = serde_json::to_vec(sample).unwrap();
        line.push(b'\n');
        line
    }

    fn pair() -> Sample {
        let mut sample = Sample::new(7, Sweep::CorePair, ByteSize::mib(8));
        sample.t_ns = Some(12_345);
        (sample.rank0_cpu, sample.rank1_cpu) = (Some(CpuId(3)), Some(CpuId(0)));
        sample.device_pair = Some([DeviceId(0), DeviceId(1)]);
        sample.iter_ns = vec![200_000, 199_999];
        sample.rank_ns = Some(vec![vec![200_000, 1], vec![199_999, 2]]);
        sample.ran_on = RanOn::Ranks(vec![vec![CpuId(3)], vec![CpuId(0)]]);
        sample.skew_ns = Some(0);
        sample.check = DataCheck::Ok;
        sample
    }

    fn copy() -> Sample {
        let mut sample = Sample::new(0, Sweep::H2d, ByteSize(1000));
        (sample.cpu, sample.device) = (Some(CpuId(3)), Some(DeviceId(15)));
        sample.load = "cpu:2".to_owned();
        sample.status = PointStatus::Failed;
        sample.reason = Some("CPU 3: refused (EINVAL)".to_owned());
        sample.host_iter_ns = Some(vec![1, 2, 3]);
        sample.timer = Timer::EventBatch;
        sample.warmup_ns = vec![5];
        sample.pinned = Some(Pinned::Registered);
        sample.page_nodes = Some([(0, 512), (11, 3)].into());
        sample.ran_on = RanOn::Thread(vec![CpuId(3), CpuId(4)]);
        (sample.sentinel, sample.settled) = (true, false);
        sample.phase = Phase::Confirm;
        sample.arena = Some(1);
        sample
    }

    /// Read into what other lines left there.
    fn read(line: &[u8]) -> Option<Sample> {
        let read = |mut into: Sample| parse(line, &mut into).map(|()| into);
        let found = read(pair());
        assert_eq!(read(copy()), found);
        assert_eq!(read(Sample::new(0, Sweep::H2d, ByteSize(0))), found);
        found
    }

    /// The general parser is the judge.
    fn check(line: &[u8]) {
        if let Some(fast) = read(line) {
            let general: Sample = serde_json::from_slice(line).unwrap();
            assert_eq!(fast, general, "{}", String::from_utf8_lossy(line));
        }
    }

    #[test]
    fn lines_of_this_library_are_read() {
        for sample in [pair(), copy(), Sample::new(1, Sweep::D2h, ByteSize(0))] {
            assert_eq!(read(&text(&sample)), Some(sample));
        }
    }

    #[test]
    fn other_lines_are_left_to_the_general_parser() {
        let line = String::from_utf8(text(&copy())).unwrap();
        for (from, to) in [
            ("{\"seq\":0", "{ \"seq\":0"),
            ("\"seq\":0", "\"seq\":00"),
            ("\"seq\":0", "\"seq\":-1"),
            ("\"seq\":0", "\"seq\":1.0"),
            ("\"seq\":0", "\"seq\":18446744073709551615"),
            ("\"cpu\":3", "\"cpu\":4294967296"),
            ("cpu:2", "cpu\\u003a2"),
            ("CPU 3:", "CPU 3 é:"),
            ("\"check\":\"off\"", "\"check\":\"off\",\"new\":1"),
            ("\"phase\":\"confirm\"", "\"phase\":\"later\""),
            ("[1,2,3]", "[1,2,3,]"),
            ("\n", ""),
            ("\n", "\n\n"),
        ] {
            assert!(line.contains(from), "{from}");
            assert_eq!(read(line.replacen(from, to, 1).as_bytes()), None, "{to}");
        }
    }

    proptest! {
        #[test]
        fn changed_lines_are_read_alike_or_not(
            of_pair: bool,
            place in 0_usize..600,
            byte in prop::sample::select(b"0123456789\"\\,:[]{}- .entrufalsx\n\xc3".to_vec()),
            cut in 0_usize..3,
        ) {
            let mut line = text(&if of_pair { pair() } else { copy() });
            let place = place % line.len();
            line.splice(place..(place + cut).min(line.len()), [byte]);
            check(&line);
        }

        #[test]
        fn numbers_survive(
            numbers in prop::collection::vec(any::<u64>(), 0..5),
            cpus in prop::collection::vec(any::<u32>(), 0..4),
            load in "[ -~é\n]{0,8}",
        ) {
            let mut sample = pair();
            sample.iter_ns.clone_from(&numbers);
            sample.rank_ns = Some(vec![numbers, vec![]]);
            sample.ran_on = RanOn::Thread(cpus.into_iter().map(CpuId).collect());
            sample.load = load;
            check(&text(&sample));
        }
    }
}
