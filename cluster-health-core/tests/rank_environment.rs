//! Which variables make a process a rank, launcher by launcher.

use std::path::PathBuf;

use cluster_health_core::{Error, RankEnvironment, RankFamily, Result};

/// `NAME=VALUE` words as an environment.
fn read(text: &str) -> Result<Option<RankEnvironment>> {
    let pairs: Vec<_> = text.split_whitespace().filter_map(|word| word.split_once('=')).collect();
    RankEnvironment::from_variables(|name| {
        pairs.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned())
    })
}

/// What torchrun sets for the second of two ranks on one host.
const TORCHRUN: &str = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 \
    GROUP_WORLD_SIZE=1 ROLE_RANK=1 ROLE_WORLD_SIZE=2 ROLE_NAME=default MASTER_ADDR=localhost \
    MASTER_PORT=29500 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 \
    TORCHELASTIC_RUN_ID=8d1f";
/// What `mpirun` of Open MPI 4 sets, as far as it matters.
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 \
    OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=3 \
    PMIX_NAMESPACE=2637037569 OMPI_MCA_ess_base_jobid=2637037569";
const SLURM: &str = "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_LOCALID=1 \
    SLURM_NTASKS=7 SLURM_STEP_NUM_TASKS=7 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=2(x2),3";

#[test]
fn each_family_is_recognised() {
    type Case<'a> = (&'a str, RankFamily, [u32; 2], [Option<u32>; 2]);
    let cases: &[Case<'_>] = &[
        (TORCHRUN, RankFamily::Torchrun, [1, 2], [Some(1), Some(2)]),
        ("RANK=1 WORLD_SIZE=4", RankFamily::Torchrun, [1, 4], [None, None]),
        ("RANK=0 WORLD_SIZE=1", RankFamily::Torchrun, [0, 1], [None, None]),
        (OPEN_MPI, RankFamily::OpenMpi, [3, 4], [Some(3), Some(4)]),
        (
            "PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1",
            RankFamily::Pmi,
            [2, 3],
            [Some(0), Some(1)],
        ),
        (
            "PMI_RANK=2 PMI_SIZE=3 PMI_LOCAL_RANK=0 PMI_LOCAL_SIZE=1",
            RankFamily::Pmi,
            [2, 3],
            [Some(0), Some(1)],
        ),
        // 2 + 2 ranks on the first nodes, 3 on this one.
        (SLURM, RankFamily::Slurm, [5, 7], [Some(1), Some(3)]),
        (
            "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_STEP_NUM_NODES=1",
            RankFamily::Slurm,
            [1, 2],
            [Some(1), Some(2)],
        ),
        (
            "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
            RankFamily::Slurm,
            [1, 2],
            [None, Some(2)],
        ),
    ];
    for (text, family, [rank, size], [local_rank, local_size]) in cases {
        let found = read(text).unwrap().unwrap_or_else(|| panic!("nothing found in {text}"));
        assert_eq!(found.family, *family, "{text}");
        assert_eq!((found.rank, found.size), (*rank, *size), "{text}");
        assert_eq!((found.local_rank, found.local_size), (*local_rank, *local_size), "{text}");
    }
}

#[test]
fn strays_are_no_environment() {
    for text in [
        "",
        "RANK=1",
        "RANK=abc",
        "WORLD_SIZE=8",
        "LOCAL_RANK=0",
        "RANK=1 WORLD_SIZE=",
        "MASTER_ADDR=node0 MASTER_PORT=29500",
        "OMPI_COMM_WORLD_RANK=1",
        "PMIX_RANK=0 PMIX_NAMESPACE=1",
        // A batch script and a shell of an allocation, whose step has one task or is Slurm's own.
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0",
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_STEP_ID=4294967290",
        "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1",
    ] {
        assert_eq!(read(text).unwrap(), None, "{text}");
    }
}

#[test]
fn contradictions_name_the_variable() {
    for (text, variable, part) in [
        ("RANK=2 WORLD_SIZE=2", "RANK", "WORLD_SIZE is 2"),
        ("RANK=-1 WORLD_SIZE=2", "RANK", "\"-1\""),
        ("RANK=0 WORLD_SIZE=two", "WORLD_SIZE", "\"two\""),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE", "0 ranks"),
        ("RANK=0 LOCAL_RANK=0", "WORLD_SIZE", "RANK and LOCAL_RANK"),
        ("WORLD_SIZE=2 LOCAL_RANK=0", "RANK", "WORLD_SIZE and LOCAL_RANK"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=2", "LOCAL_RANK", "WORLD_SIZE is 2"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=x", "LOCAL_RANK", "\"x\""),
        ("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1", "LOCAL_RANK", "is 1"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE", "4 ranks on this host"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE", "0 ranks on this host"),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=http", "MASTER_PORT", "\"http\""),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=65535", "CLUSTER_HEALTH_PORT", "65535"),
        ("OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_RANK", "is 4"),
        ("PMI_RANK=4294967296 PMI_SIZE=2", "PMI_RANK", "4294967296"),
        ("SLURM_STEP_ID=1 SLURM_PROCID=2 SLURM_NTASKS=2", "SLURM_PROCID", "SLURM_NTASKS is 2"),
        (
            "SLURM_STEP_ID=1 SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=0 \
             SLURM_STEP_TASKS_PER_NODE=2(y2)",
            "SLURM_STEP_TASKS_PER_NODE",
            "2(y2)",
        ),
    ] {
        match read(text) {
            Err(Error::Invalid { option, message }) => {
                assert_eq!(option, variable, "{text}: {message}");
                assert!(message.contains(part), "{text}: {message}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn the_launcher_inside_wins_and_others_are_not_judged() {
    let family = |text: &str| read(text).unwrap().map(|found| (found.family, found.size));
    let broken_slurm = "SLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_NTASKS=2";
    assert!(read(broken_slurm).is_err());
    let cases = [
        (format!("{TORCHRUN} {SLURM}"), (RankFamily::Torchrun, 2)),
        (format!("{TORCHRUN} {broken_slurm}"), (RankFamily::Torchrun, 2)),
        (format!("{OPEN_MPI} {SLURM}"), (RankFamily::OpenMpi, 4)),
        (format!("RANK=7 {OPEN_MPI}"), (RankFamily::OpenMpi, 4)),
        (format!("{TORCHRUN} {OPEN_MPI}"), (RankFamily::Torchrun, 2)),
        (format!("PMI_RANK=0 PMI_SIZE=2 {SLURM}"), (RankFamily::Pmi, 2)),
    ];
    for (text, expected) in cases {
        assert_eq!(family(&text), Some(expected), "{text}");
    }
    // What contradicts itself is an error even where the next family would do.
    assert!(read(&format!("RANK=2 WORLD_SIZE=2 {OPEN_MPI}")).is_err());
}

#[test]
fn slurm_completes_its_own_pmi_plugin_only() {
    let slurm = "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 \
        SLURM_STEP_TASKS_PER_NODE=2";
    let same = read(&format!("PMI_RANK=1 PMI_SIZE=2 {slurm}")).unwrap().unwrap();
    assert_eq!((same.family, same.local_size), (RankFamily::Pmi, Some(2)));
    assert!(same.is_local());
    let nested = read(&format!("PMI_RANK=1 PMI_SIZE=4 {slurm}")).unwrap().unwrap();
    assert_eq!(nested.local_size, None);
    assert!(!nested.is_local());
}

#[test]
fn jobs_are_told_apart_and_ranks_of_one_are_not() {
    let job = |text: &str| read(text).unwrap().unwrap().job;
    let other_rank = TORCHRUN.replace("RANK=1", "RANK=0");
    assert_eq!(job(TORCHRUN), job(&other_rank));
    for (a, b) in [
        (TORCHRUN.to_owned(), TORCHRUN.replace("RUN_ID=8d1f", "RUN_ID=none")),
        (TORCHRUN.to_owned(), TORCHRUN.replace("MASTER_PORT=29500", "MASTER_PORT=29501")),
        (TORCHRUN.to_owned(), TORCHRUN.replace("RESTART_COUNT=0", "RESTART_COUNT=1")),
        (OPEN_MPI.to_owned(), OPEN_MPI.replace("2637037569", "2637037570")),
        (SLURM.to_owned(), SLURM.replace("STEP_ID=0", "STEP_ID=1")),
        (SLURM.to_owned(), format!("{SLURM} CLUSTER_HEALTH_JOB=mine")),
    ] {
        assert_ne!(job(&a), job(&b), "{b}");
    }
    assert_eq!(job("PMI_RANK=0 PMI_SIZE=2"), "");
}

#[test]
fn meeting_between_hosts() {
    let place = |text: &str| {
        read(&format!("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 {text}")).unwrap().unwrap().rendezvous
    };
    for (text, expected) in [
        ("", None),
        ("MASTER_ADDR=node0", None),
        ("MASTER_ADDR=node0 MASTER_PORT=29500", Some("node0:29501")),
        ("MASTER_ADDR=node0 MASTER_PORT=29500 CLUSTER_HEALTH_PORT=4000", Some("node0:4000")),
        ("MASTER_ADDR=fe80::1 CLUSTER_HEALTH_PORT=4000", Some("[fe80::1]:4000")),
        ("MASTER_ADDR=a MASTER_PORT=1 CLUSTER_HEALTH_RENDEZVOUS=b:2", Some("b:2")),
    ] {
        assert_eq!(place(text).as_deref(), expected, "{text}");
    }
    let local = read(TORCHRUN).unwrap().unwrap();
    assert_eq!(local.rendezvous, None);
}

#[test]
fn the_token_is_not_shown_and_folders_keep_their_order() {
    let text = format!("{TORCHRUN} CLUSTER_HEALTH_TOKEN=geheim TMPDIR=/t XDG_RUNTIME_DIR=/run/u");
    let found = read(&text).unwrap().unwrap();
    assert!(found.token.is_some());
    assert!(!format!("{found:?}").contains("geheim"));
    assert_eq!(found.folders, ["/run/u", "/t", "/tmp"].map(PathBuf::from));
}
