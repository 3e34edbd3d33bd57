//! A sweep asked for in JSON, as programs in other languages do.

use std::time::Duration;

use cluster_health_core::affinity::parse_id_list;
use cluster_health_core::{Bandwidth, ByteSize, LoadProfile, Machine, parse_duration};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ArenaPolicy, CheckPolicy, CorePairPlan, Direction, H2dPlan, Order, Sampling};
use crate::error::{Error, Result, as_fields};

/// Longest document; the longest useful one is two lists of some thousand CPUs.
const MOST_BYTES: usize = 1 << 20;

/// A sweep as JSON asks for it; [`build`](Self::build) checks it against a machine.
///
/// The fields are the options of the command line with underscores, and have its defaults:
///
/// | field | value | default |
/// |---|---|---|
/// | `sweep` | `"h2d"` (copies, see `direction`) or `"core_pair"` | required |
/// | `cpus`, `devices` | `h2d`: rows and columns, `"0-3,8"`, `[0, 1]`, a number, or `"auto"` | `"auto"` |
/// | `rank0_cpus`, `rank1_cpus` | `core_pair`: rows and columns, the same | `"auto"` |
/// | `device_pair` | `core_pair`: devices of the ranks, `"0,1"` or `[0, 1]` | the first two, a single one twice |
/// | `sizes` | bytes per copy, per rank of pairs: `"16MiB,64MiB"`, `["16MiB", 65536]` or a number | as the builders' |
/// | `direction` | `h2d`: `"h2d"`, `"d2h"`, `"bidirectional"` | `"h2d"` |
/// | `concurrent` | `h2d`: all other devices copy, too | `false` |
/// | `arena` | `h2d`: `"node"`, `"core"` | `"node"` |
/// | `iters`, `repeats`, `seed` | whole numbers | 3, 3, 1 |
/// | `warmup` | exactly so many transfers | until settled |
/// | `ci`, `min_effect`, `target` | shares: `0.03`, `"3%"` | off, 3 %, off |
/// | `order` | `"blocks"`, `"sequential"` | `"blocks"` |
/// | `sample` | a part of the cells is measured; `budget` and `target` imply it | `false` |
/// | `budget`, `timeout` | `"500ms"`, `"30s"`, `"2m"`; a number is seconds | 30 s, pairs 8 s; 30 s |
/// | `load` | `"idle,cpu:2"`, `["idle", "cpu:2"]` | `"idle"` |
/// | `check` | `"tags"`, `"full"`, `"off"` | `"tags"` |
/// | `expect` | `"58.5GB/s"`; a number is decimal GB/s | none |
///
/// `null` is the default, too.
///
/// ```
/// use cluster_health_core::{Machine, Scenario};
/// use cluster_health_matrix::plan::{PlanRequest, SweepPlan};
///
/// # fn main() -> cluster_health_matrix::Result<()> {
/// let scenario = Scenario::parse("[machine]\ncpus = 8\nnuma_nodes = 2\ndevices = 2\n", "example")?;
/// let machine = Machine::synthetic(scenario)?;
/// let text = r#"{"sweep": "h2d", "cpus": "0-3", "devices": [1], "sizes": ["16MiB"], "seed": 7}"#;
/// let SweepPlan::H2d(plan) = PlanRequest::from_json(text)?.build(&machine)? else { panic!() };
/// assert_eq!((plan.cells(), plan.seed), (4, 7));
///
/// let error = PlanRequest::from_json(r#"{"sweep": "h2d", "iters": "many"}"#).unwrap_err();
/// assert!(error.to_string().starts_with("iters: "));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct PlanRequest {
    is_pair: bool,
    cpus: Option<Vec<u32>>,
    devices: Option<Vec<u32>>,
    rank0_cpus: Option<Vec<u32>>,
    rank1_cpus: Option<Vec<u32>>,
    device_pair: Option<[u32; 2]>,
    direction: Option<Direction>,
    concurrent: bool,
    arena: Option<ArenaPolicy>,
    sizes: Option<Vec<ByteSize>>,
    iters: Option<u32>,
    warmup: Option<u32>,
    repeats: Option<u32>,
    seed: Option<u64>,
    ci: Option<f64>,
    min_effect: Option<f64>,
    order: Option<Order>,
    sample: Option<Sampling>,
    loads: Option<Vec<LoadProfile>>,
    check: Option<CheckPolicy>,
    timeout: Option<Duration>,
    expect: Option<Bandwidth>,
}

/// The plan of either sweep; as JSON it is the plan itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum SweepPlan {
    /// Copies between host and device.
    H2d(H2dPlan),
    /// An all-gather of two ranks.
    CorePair(CorePairPlan),
}

/// The document before its values have a meaning: read one by one, so that an error can name the
/// field that it is about.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    sweep: Value,
    cpus: Option<Value>,
    devices: Option<Value>,
    rank0_cpus: Option<Value>,
    rank1_cpus: Option<Value>,
    device_pair: Option<Value>,
    direction: Option<Value>,
    concurrent: Option<Value>,
    arena: Option<Value>,
    sizes: Option<Value>,
    iters: Option<Value>,
    warmup: Option<Value>,
    repeats: Option<Value>,
    seed: Option<Value>,
    ci: Option<Value>,
    min_effect: Option<Value>,
    order: Option<Value>,
    sample: Option<Value>,
    budget: Option<Value>,
    target: Option<Value>,
    load: Option<Value>,
    check: Option<Value>,
    timeout: Option<Value>,
    expect: Option<Value>,
}

impl PlanRequest {
    /// Reads a JSON object.
    ///
    /// # Errors
    /// [`Error::Invalid`] whose `option` is the field at fault, `plan` when the document as a whole
    /// is: it is no JSON object, has an unknown field or one twice, or lacks `sweep`.
    pub fn from_json(text: &str) -> Result<Self> {
        if text.len() > MOST_BYTES {
            let message = format!("{} bytes of JSON; at most {MOST_BYTES} are read", text.len());
            return Err(Error::invalid("plan", message));
        }
        let document: Document = serde_json::from_str(text)
            .map_err(|error| Error::invalid("plan", format!("no usable JSON object: {error}")))?;
        let is_pair = match document.sweep.as_str() {
            Some("h2d") => false,
            Some("core_pair") => true,
            _ => {
                let message = format!("{}: use \"h2d\" or \"core_pair\"", document.sweep);
                return Err(Error::invalid("sweep", message));
            }
        };
        document.refuse_fields_of_other_sweep(is_pair)?;
        let usual = if is_pair { Sampling::PAIRS } else { Sampling::COPIES };
        let (budget, target) =
            (duration("budget", document.budget)?, share("target", document.target)?);
        let sampled = plain("sample", document.sample)?.unwrap_or(false);
        let sample = (sampled || budget.is_some() || target.is_some())
            .then(|| Sampling::within(budget.unwrap_or(usual)).with_target(target));
        Ok(Self {
            is_pair,
            cpus: ids("cpus", document.cpus)?,
            devices: ids("devices", document.devices)?,
            rank0_cpus: ids("rank0_cpus", document.rank0_cpus)?,
            rank1_cpus: ids("rank1_cpus", document.rank1_cpus)?,
            device_pair: pair("device_pair", document.device_pair)?,
            direction: plain("direction", document.direction)?,
            concurrent: plain("concurrent", document.concurrent)?.unwrap_or(false),
            arena: plain("arena", document.arena)?,
            sizes: elements("sizes", document.sizes)?,
            iters: plain("iters", document.iters)?,
            warmup: plain("warmup", document.warmup)?,
            repeats: plain("repeats", document.repeats)?,
            seed: plain("seed", document.seed)?,
            ci: share("ci", document.ci)?,
            min_effect: share("min_effect", document.min_effect)?,
            order: plain("order", document.order)?,
            sample,
            loads: elements("load", document.load)?,
            check: plain("check", document.check)?,
            timeout: duration("timeout", document.timeout)?,
            expect: parsed("expect", document.expect)?,
        })
    }

    /// Checks everything against the machine; nothing is allocated or bound, but see
    /// [`H2dPlanBuilder::build`](super::H2dPlanBuilder::build).
    ///
    /// # Errors
    /// As the builders; `option` is the field at fault, or several.
    pub fn build(&self, machine: &Machine) -> Result<SweepPlan> {
        self.build_plan(machine).map_err(in_words_of_json)
    }

    fn build_plan(&self, machine: &Machine) -> Result<SweepPlan> {
        /// What both builders have, set where the document says something.
        macro_rules! with_common {
            ($builder:expr) => {{
                let mut builder = $builder
                    .warmup(self.warmup)
                    .ci(self.ci)
                    .sample(self.sample)
                    .expect(self.expect);
                if let Some(sizes) = &self.sizes {
                    builder = builder.sizes(sizes.iter().copied());
                }
                if let Some(loads) = &self.loads {
                    builder = builder.loads(loads.iter().copied());
                }
                with_common!(@set builder, iters repeats seed min_effect order check timeout);
                builder
            }};
            (@set $builder:ident, $($field:ident)*) => {
                $(if let Some(value) = self.$field {
                    $builder = $builder.$field(value);
                })*
            };
        }
        if self.is_pair {
            let mut builder = with_common!(CorePairPlan::builder());
            if let Some(cpus) = &self.rank0_cpus {
                builder = builder.rank0_cpus(cpus.iter().copied());
            }
            if let Some(cpus) = &self.rank1_cpus {
                builder = builder.rank1_cpus(cpus.iter().copied());
            }
            if let Some(pair) = self.device_pair {
                builder = builder.device_pair(pair);
            }
            return builder.build(machine).map(SweepPlan::CorePair);
        }
        let mut builder = with_common!(H2dPlan::builder())
            .concurrent(self.concurrent)
            .direction(self.direction.unwrap_or_default())
            .arena(self.arena.unwrap_or_default());
        if let Some(cpus) = &self.cpus {
            builder = builder.cpus(cpus.iter().copied());
        }
        if let Some(devices) = &self.devices {
            builder = builder.devices(devices.iter().copied());
        }
        builder.build(machine).map(SweepPlan::H2d)
    }
}

impl Document {
    /// A field that would be ignored is a mistake.
    fn refuse_fields_of_other_sweep(&self, is_pair: bool) -> Result<()> {
        let of_copies = [
            ("cpus", &self.cpus),
            ("devices", &self.devices),
            ("direction", &self.direction),
            ("concurrent", &self.concurrent),
            ("arena", &self.arena),
        ];
        let of_pairs = [
            ("rank0_cpus", &self.rank0_cpus),
            ("rank1_cpus", &self.rank1_cpus),
            ("device_pair", &self.device_pair),
        ];
        let (other, own) = if is_pair {
            (&of_copies[..], "core_pair takes rank0_cpus, rank1_cpus, device_pair")
        } else {
            (&of_pairs[..], "h2d takes cpus, devices")
        };
        match other.iter().find(|(_, value)| value.is_some()) {
            Some((name, _)) => Err(Error::invalid(*name, format!("is of the other sweep; {own}"))),
            None => Ok(()),
        }
    }
}

/// A value whose JSON is that of its type.
fn plain<T: DeserializeOwned>(name: &str, value: Option<Value>) -> Result<Option<T>> {
    let read = |value| {
        serde_json::from_value(value).map_err(|error| Error::invalid(name, error.to_string()))
    };
    value.map(read).transpose()
}

fn wrong(name: &str, value: &Value, right: &str) -> Error {
    let mut text = value.to_string();
    if text.chars().count() > 60 {
        text = text.chars().take(60).chain(['…']).collect();
    }
    Error::invalid(name, format!("{text} is no {right}"))
}

/// A value with a text of its own; a number is read as that text.
fn parsed<T>(name: &str, value: Option<Value>) -> Result<Option<T>>
where
    T: std::str::FromStr<Err = cluster_health_core::Error>,
{
    value.map(|value| element(name, &value)).transpose()
}

fn element<T>(name: &str, value: &Value) -> Result<T>
where
    T: std::str::FromStr<Err = cluster_health_core::Error>,
{
    match value {
        Value::String(text) => renamed(name, text.parse()),
        Value::Number(number) => renamed(name, number.to_string().parse()),
        other => Err(wrong(name, other, "text or number")),
    }
}

/// A list, or text with commas.
fn elements<T>(name: &str, value: Option<Value>) -> Result<Option<Vec<T>>>
where
    T: std::str::FromStr<Err = cluster_health_core::Error>,
{
    let values = match value {
        None => return Ok(None),
        Some(Value::Array(values)) => values,
        Some(Value::String(text)) => text.split(',').map(Value::from).collect(),
        Some(other) => vec![other],
    };
    values
        .iter()
        .zip(1..)
        .map(|(value, place)| element(name, value).map_err(|error| at_element(place, error)))
        .collect::<Result<_>>()
        .map(Some)
}

fn at_element(place: usize, error: Error) -> Error {
    match error {
        Error::Invalid { option, message } => {
            Error::invalid(option, format!("element {place}: {message}"))
        }
        other => other,
    }
}

fn ids(name: &str, value: Option<Value>) -> Result<Option<Vec<u32>>> {
    match value {
        None => Ok(None),
        Some(Value::String(text)) if text.trim() == "auto" => Ok(None),
        Some(value) => id_list(name, &value).map(Some),
    }
}

fn id_list(name: &str, value: &Value) -> Result<Vec<u32>> {
    const RIGHT: &str = "list of ids such as \"0-3,8\" or [0, 1]";
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::String(text) => Ok(parse_id_list(name, text)?),
        Value::Array(values) => values
            .iter()
            .zip(1..)
            .map(|(value, place)| {
                id(value).ok_or_else(|| at_element(place, wrong(name, value, "id such as 0")))
            })
            .collect(),
        other => Ok(vec![id(other).ok_or_else(|| wrong(name, other, RIGHT))?]),
    }
}

/// Unlike in a list of devices, one may stand here twice.
fn pair(name: &str, value: Option<Value>) -> Result<Option<[u32; 2]>> {
    let Some(value) = value else { return Ok(None) };
    let parts = match &value {
        Value::String(text) => {
            let parts = text.split(',').map(|part| parse_id_list(name, part));
            parts.collect::<Result<Vec<_>, _>>()?.concat()
        }
        Value::Array(_) => id_list(name, &value)?,
        _ => Vec::new(),
    };
    match parts[..] {
        [rank0, rank1] => Ok(Some([rank0, rank1])),
        _ => Err(wrong(name, &value, "pair of devices such as [0, 1]")),
    }
}

/// `0.02` or `"2%"`.
fn share(name: &str, value: Option<Value>) -> Result<Option<f64>> {
    let read = |value: Value| {
        let number = match &value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => match text.trim().strip_suffix('%') {
                Some(percent) => percent.trim().parse().ok().map(|percent: f64| percent * 0.01),
                None => text.trim().parse().ok(),
            },
            _ => None,
        };
        number.ok_or_else(|| wrong(name, &value, "share such as 0.02 or \"2%\""))
    };
    value.map(read).transpose()
}

fn duration(name: &str, value: Option<Value>) -> Result<Option<Duration>> {
    let read = |value: Value| match &value {
        Value::String(text) => renamed(name, parse_duration(text)),
        Value::Number(seconds) => renamed(name, parse_duration(&seconds.to_string())),
        other => Err(wrong(name, other, "duration such as \"30s\"")),
    };
    value.map(read).transpose()
}

/// The error of a type's own text, under the name of the field.
fn renamed<T>(name: &str, result: cluster_health_core::Result<T>) -> Result<T> {
    result.map_err(|error| Error::named(name, error))
}

/// The builders name the options of the command line: `--rank0-cpus` is `rank0_cpus` here.
fn in_words_of_json(error: Error) -> Error {
    match error {
        Error::Invalid { option, message }
        | Error::Core(cluster_health_core::Error::Invalid { option, message }) => {
            Error::invalid(as_fields(&option), as_fields(&message))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use cluster_health_core::Scenario;

    use super::*;

    fn machine() -> Machine {
        let text = "[machine]\ncpus = 16\nsmt = 2\nnuma_nodes = 2\ndevices = 4\n";
        Machine::synthetic(Scenario::parse(text, "test").unwrap()).unwrap()
    }

    fn built(text: &str) -> SweepPlan {
        PlanRequest::from_json(text).unwrap().build(&machine()).unwrap()
    }

    #[test]
    fn the_shortest_requests_are_the_builders_defaults() {
        let plan = H2dPlan::builder().build(&machine()).unwrap();
        assert_eq!(built(r#"{"sweep": "h2d"}"#), SweepPlan::H2d(plan.clone()));
        assert_eq!(
            built(r#"{"sweep": "h2d", "cpus": "auto", "devices": null, "iters": null}"#),
            SweepPlan::H2d(plan)
        );
        let plan = CorePairPlan::builder().build(&machine()).unwrap();
        assert_eq!(built(r#"{"sweep": "core_pair"}"#), SweepPlan::CorePair(plan));
    }

    #[test]
    fn every_field_of_copies_is_passed_on() {
        let text = r#"{
            "sweep": "h2d", "cpus": "8,0-2", "devices": [3, 1], "sizes": ["64KiB", 4096],
            "direction": "d2h", "arena": "core", "iters": 5, "warmup": 2, "repeats": 4, "seed": 18446744073709551615,
            "ci": "2%", "min_effect": 0.05, "order": "sequential", "load": "idle,cpu:2",
            "check": "off", "timeout": "500ms", "expect": "58.5GB/s"
        }"#;
        let plan = H2dPlan::builder()
            .cpus([8, 0, 1, 2])
            .devices([3, 1])
            .sizes([ByteSize::kib(64), ByteSize(4096)])
            .direction(Direction::D2h)
            .arena(ArenaPolicy::Core)
            .iters(5)
            .warmup(Some(2))
            .repeats(4)
            .seed(u64::MAX)
            .ci(Some(0.02))
            .min_effect(0.05)
            .order(Order::Sequential)
            .loads(["idle".parse().unwrap(), "cpu:2".parse().unwrap()])
            .check(CheckPolicy::Off)
            .timeout(Duration::from_millis(500))
            .expect(Some(Bandwidth::gb_per_second(58.5)))
            .build(&machine())
            .unwrap();
        assert_eq!(built(text), SweepPlan::H2d(plan));
    }

    #[test]
    fn every_field_of_pairs_is_passed_on() {
        let text = r#"{
            "sweep": "core_pair", "rank0_cpus": 5, "rank1_cpus": [1, 2], "device_pair": "2,2",
            "sizes": "1MiB", "budget": 2, "target": 0.1, "timeout": 1.5, "expect": 40
        }"#;
        let sampling = Sampling::within(Duration::from_secs(2)).with_target(Some(0.1));
        let plan = CorePairPlan::builder()
            .rank0_cpus([5])
            .rank1_cpus([1, 2])
            .device_pair([2, 2])
            .sizes([ByteSize::mib(1)])
            .sample(Some(sampling))
            .timeout(Duration::from_millis(1500))
            .expect(Some(Bandwidth::gb_per_second(40.0)))
            .build(&machine())
            .unwrap();
        assert_eq!(built(text), SweepPlan::CorePair(plan));
    }

    #[test]
    fn sampling_has_the_usual_budget_of_its_sweep() {
        for (sweep, seconds) in [("h2d", 30), ("core_pair", 8)] {
            let sample = match built(&format!(r#"{{"sweep": "{sweep}", "sample": true}}"#)) {
                SweepPlan::H2d(plan) => plan.sample,
                SweepPlan::CorePair(plan) => plan.sample,
            };
            assert_eq!(sample, Some(Sampling::within(Duration::from_secs(seconds))));
        }
    }

    #[test]
    fn errors_name_the_field() {
        for (text, option, part) in [
            ("", "plan", "EOF"),
            ("[]", "plan", "JSON object"),
            (r#"{"cpus": "0"}"#, "plan", "sweep"),
            (r#"{"sweep": "h2d", "cpu": "0"}"#, "plan", "`cpu`"),
            (r#"{"sweep": "h2d", "seed": 1, "seed": 2}"#, "plan", "`seed`"),
            (r#"{"sweep": "d2h"}"#, "sweep", "core_pair"),
            (r#"{"sweep": 7}"#, "sweep", "h2d"),
            (r#"{"sweep": "h2d", "rank0_cpus": "0"}"#, "rank0_cpus", "other sweep"),
            (r#"{"sweep": "core_pair", "cpus": "0"}"#, "cpus", "rank0_cpus"),
            (r#"{"sweep": "h2d", "cpus": "0,x"}"#, "cpus", "element 2"),
            (r#"{"sweep": "h2d", "cpus": [0, -1]}"#, "cpus", "element 2"),
            (r#"{"sweep": "h2d", "cpus": 0.5}"#, "cpus", "0.5"),
            (r#"{"sweep": "h2d", "cpus": [1, 99]}"#, "cpus", "CPU 99"),
            (r#"{"sweep": "h2d", "devices": [1, 1]}"#, "devices", "element 2"),
            (r#"{"sweep": "h2d", "sizes": ["1MiB", "1Mib/s"]}"#, "sizes", "element 2"),
            (r#"{"sweep": "h2d", "sizes": [true]}"#, "sizes", "true"),
            (r#"{"sweep": "h2d", "sizes": 0}"#, "sizes", "0 bytes"),
            (r#"{"sweep": "h2d", "iters": "3"}"#, "iters", "u32"),
            (r#"{"sweep": "h2d", "iters": 0}"#, "iters", "one"),
            (r#"{"sweep": "h2d", "seed": -1}"#, "seed", "u64"),
            (r#"{"sweep": "h2d", "ci": "x%"}"#, "ci", "x%"),
            (r#"{"sweep": "h2d", "min_effect": 0}"#, "min_effect", "above 0"),
            (r#"{"sweep": "h2d", "direction": "up"}"#, "direction", "bidirectional"),
            (r#"{"sweep": "h2d", "timeout": "1 day"}"#, "timeout", "unit"),
            (r#"{"sweep": "h2d", "timeout": []}"#, "timeout", "[]"),
            (r#"{"sweep": "h2d", "load": ["idle", "gpu"]}"#, "load", "element 2"),
            (r#"{"sweep": "h2d", "expect": "fast"}"#, "expect", "unit"),
            (r#"{"sweep": "h2d", "sample": true, "ci": 0.1}"#, "ci", "use target"),
            (r#"{"sweep": "core_pair", "device_pair": [0]}"#, "device_pair", "[0]"),
            (r#"{"sweep": "core_pair", "device_pair": "0,1,2"}"#, "device_pair", "0,1,2"),
            (r#"{"sweep": "core_pair", "rank1_cpus": ""}"#, "rank1_cpus", "empty"),
        ] {
            let error = PlanRequest::from_json(text)
                .and_then(|request| request.build(&machine()))
                .expect_err(text);
            assert!(error.is_usage(), "{text}: {error}");
            let message = error.to_string();
            assert!(message.starts_with(&format!("{option}: ")), "{text}: {message}");
            assert!(message.contains(part) && !message.contains("--"), "{text}: {message}");
        }
    }

    #[test]
    fn documents_are_bounded() {
        let long = format!(r#"{{"sweep": "h2d", "cpus": "{}"}}"#, "1,".repeat(MOST_BYTES / 2));
        assert!(PlanRequest::from_json(&long).unwrap_err().to_string().contains("at most"));
        let deep = format!(r#"{{"sweep": "h2d", "cpus": {}"#, "[".repeat(100_000));
        assert!(PlanRequest::from_json(&deep).unwrap_err().to_string().contains("recursion"));
        let many = format!(r#"{{"sweep": "h2d", "iters": "{}"}}"#, "x".repeat(1000));
        assert!(PlanRequest::from_json(&many).is_err());
    }
}
