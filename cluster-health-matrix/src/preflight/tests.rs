use std::thread;

use cluster_health_core::{RankGroup, Scenario};

use super::*;
use crate::CancelToken;

fn machine(text: &str) -> Machine {
    Machine::synthetic(Scenario::parse(text, "test").unwrap()).unwrap()
}

const NODE: &str = "[machine]\ncpus = 32\nnuma_nodes = 2\ndevices = 4\n";

fn brief() -> Preflight {
    Preflight::new().budget(Duration::from_secs(2))
}

/// Each rank on a thread: which host it claims to be on, and the text of its machine.
fn together(ranks: &[(&str, &str)]) -> Vec<Result<Outcome>> {
    let groups = RankGroup::threads(u32::try_from(ranks.len()).unwrap()).unwrap();
    thread::scope(|scope| {
        let start = |(mut group, (host, text)): (RankGroup, &(&str, &str))| {
            let (host, text) = ((*host).to_owned(), (*text).to_owned());
            scope.spawn(move || {
                let machine = machine(&text);
                ranks::run(&brief(), &machine, &Baseline::itself(), &mut group, &host, &mut ())
            })
        };
        let threads: Vec<_> = groups.into_iter().zip(ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn one_rank_of_each_host_measures_and_all_get_the_worst_answer() {
    let sick = format!("{NODE}[[fault]]\nkind = \"slow_device\"\ndevices = \"2\"\nfactor = 0.7\n");
    let found = together(&[("a", NODE), ("b", &sick), ("a", &sick), ("b", NODE)]);
    let outcomes: Vec<Outcome> = found.into_iter().map(Result::unwrap).collect();
    let ranks: Vec<(u32, Gate)> =
        outcomes[0].nodes.iter().map(|node| (node.rank, node.verdict)).collect();
    assert_eq!(ranks, [(0, Gate::Pass), (1, Gate::Fail)]);
    assert_eq!(outcomes[0].verdict, Gate::Fail);
    assert!(outcomes[0].reasons[0].starts_with("rank 1: slow_device, device 2"), "{outcomes:?}");
    assert!(outcomes.iter().all(|outcome| outcome == &outcomes[0]));
}

#[test]
fn what_fails_on_one_rank_is_an_error_on_all() {
    // No CPU can be bound on the other host.
    let useless = "[machine]\ncpus = 4\ndevices = 1\nrefuse_bind = \"0-3\"\n";
    for hosts in [[("a", useless), ("a", NODE)], [("a", NODE), ("b", useless)]] {
        for found in together(&hosts) {
            let error = found.unwrap_err().to_string();
            assert!(error.contains("CPU"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_is_gone_is_named_by_the_others() {
    let mut groups = RankGroup::threads(3).unwrap();
    groups.truncate(2);
    let threads: Vec<_> = groups
        .into_iter()
        .map(|mut group| {
            thread::spawn(move || {
                let machine = machine(NODE);
                brief().run(&machine, &Baseline::itself(), Some(&mut group), &mut ())
            })
        })
        .collect();
    for thread in threads {
        let error = thread.join().unwrap().unwrap_err();
        let rank = cluster_health_core::Error::rank;
        let Error::Core(core) = &error else { panic!("{error}") };
        assert_eq!((core.kind(), rank(core)), ("rank", Some(2)), "{error}");
    }
}

#[test]
fn different_settings_are_refused() {
    let threads: Vec<_> = RankGroup::threads(2)
        .unwrap()
        .into_iter()
        .map(|mut group| {
            thread::spawn(move || {
                let seed = u64::from(group.rank());
                let preflight = brief().seed(seed);
                preflight.run(&machine(NODE), &Baseline::itself(), Some(&mut group), &mut ())
            })
        })
        .collect();
    for thread in threads {
        let error = thread.join().unwrap().unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("seed"), "{error}");
    }
}

#[test]
fn an_interrupted_run_is_inconclusive() {
    let mut cancel = CancelToken::new();
    cancel.cancel();
    let outcome = brief().run(&machine(NODE), &Baseline::itself(), None, &mut cancel).unwrap();
    assert_eq!((outcome.verdict, outcome.exit_code()), (Gate::Inconclusive, 1));
    assert!(outcome.reasons[0].contains("did not come to its end"), "{:?}", outcome.reasons);
}

#[test]
fn the_sizes_are_those_of_the_baseline() {
    let machine = machine(NODE);
    let of = |sizes: &[u64]| {
        let sizes: Vec<ByteSize> = sizes.iter().copied().map(ByteSize::mib).collect();
        let plan = H2dPlan::builder().sizes(sizes).repeats(1).build(&machine).unwrap();
        let affinity = AffinityFile::of(machine.census().unwrap());
        let report = in_memory(&machine, &plan, affinity, &mut ()).unwrap();
        let baseline = Baseline::of_report("baseline", &report).unwrap();
        brief().plan(&machine, &baseline).unwrap().sizes
    };
    assert_eq!(of(&[4, 256, 8]), [4, 8].map(ByteSize::mib));
    assert_eq!(of(&[512, 256]), [ByteSize::mib(256)]);
    assert_eq!(
        brief().plan(&machine, &Baseline::itself()).unwrap().sizes,
        SIZES.map(ByteSize::mib)
    );
    let error = brief().min_change(1.0).plan(&machine, &Baseline::itself()).unwrap_err();
    assert!(error.to_string().starts_with("--min-change: 1: "), "{error}");
}
