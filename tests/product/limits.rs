//! Limits of the environment, as containers and sites set them, tried for real.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::ranks::{Running, assert_complete, assert_nothing_left, two_cpus};
use crate::support::{Folder, Place, Ran, assert_whole, json};

const CAP_IPC_LOCK: libc::c_ulong = 14;

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes these system calls of the command fail with this errno.
pub(crate) fn refuse(command: &mut Command, calls: &[libc::c_long], errno: i32) {
    let word = |code: u32| u16::try_from(code).unwrap();
    let load = word(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS);
    let equal = word(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
    let give = word(libc::BPF_RET | libc::BPF_K);
    // The number of the call is the first word of what a filter sees.
    let mut filter = vec![libc::sock_filter { code: load, jt: 0, jf: 0, k: 0 }];
    for (at, number) in calls.iter().enumerate() {
        let to_refusal = u8::try_from(calls.len() - at).unwrap();
        let number = u32::try_from(*number).unwrap();
        filter.push(libc::sock_filter { code: equal, jt: to_refusal, jf: 0, k: number });
    }
    let refusal = libc::SECCOMP_RET_ERRNO | u32::try_from(errno).unwrap();
    filter.push(libc::sock_filter { code: give, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW });
    filter.push(libc::sock_filter { code: give, jt: 0, jf: 0, k: refusal });
    let apply = move || {
        let program = libc::sock_fprog {
            len: u16::try_from(filter.len()).unwrap_or_default(),
            filter: filter.as_mut_ptr(),
        };
        // SAFETY:
        // * prctl with these arguments takes no pointers.
        check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
        let program: *const libc::sock_fprog = &raw const program;
        // SAFETY:
        // * The program and its filter live until the call returns; the kernel copies them.
        check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, program) })
    };
    // SAFETY:
    // * Between fork and exec the closure makes two system calls and nothing else: the filter was
    //   allocated before.
    unsafe { command.pre_exec(apply) };
}

/// Starts the command with this limit, which binds it also where this process is privileged.
pub(crate) fn limit(command: &mut Command, what: libc::__rlimit_resource_t, value: u64) {
    let apply = move || {
        // The limit of locked memory does not bind who holds the capability; what is not in the
        // bounding set is not regained by exec. Who may not change the set does not hold it either.
        // SAFETY:
        // * prctl with these arguments takes no pointers.
        unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) };
        let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
        let limit: *const libc::rlimit = &raw const limit;
        // SAFETY:
        // * The limit lives until the call returns.
        check(unsafe { libc::setrlimit(what, limit) })
    };
    // SAFETY:
    // * Between fork and exec the closure makes two system calls and nothing else.
    unsafe { command.pre_exec(apply) };
}

const H2D: &str = "h2d --quiet --json --backend host --sizes 1MiB --repeats 2 --out @out";

/// An error with a document that says what is missing, or results.
fn ended(place: &Place, ran: &Ran, what: &str) -> bool {
    match ran.code {
        Some(0 | 1) => {
            assert_whole(ran);
            assert_eq!(json(&place.path("out/run.json"))["status"], "complete", "{what}");
            true
        }
        Some(2) => {
            let error = &ran.json()["error"];
            let message = error["message"].as_str().unwrap();
            assert!(!message.is_empty() && ran.stderr.contains(message), "{what}: {ran:?}");
            false
        }
        other => panic!("{what}: ended with {other:?}: {ran:?}"),
    }
}

#[test]
fn few_open_files_are_enough_and_fewer_an_error() {
    let Some([a, b]) = two_cpus() else { return };
    let pairs = format!(
        "core-pair --quiet --json --backend host --sizes 64KiB --rank0-cpus {a},{b} \
         --rank1-cpus {a},{b} --repeats 2 --out @out"
    );
    for line in [H2D, &pairs] {
        let mut whole = 0;
        // 256 is what some sites give; below 16 there is no room for what is needed.
        for count in [256, 64, 32, 16, 12, 10, 8, 6, 5, 4] {
            let place = Place::new();
            let mut command = place.command(line);
            limit(&mut command, libc::RLIMIT_NOFILE, count);
            let ran = Running::start(&place, "run", command).end();
            if ended(&place, &ran, &format!("{count} files")) {
                whole += 1;
            } else {
                assert!(count < 32, "{count} files: {ran:?}");
                assert!(
                    ran.stderr.contains("EMFILE") || ran.stderr.contains("open files"),
                    "{ran:?}"
                );
            }
            assert_nothing_left(&place);
        }
        assert!((3..10).contains(&whole), "{whole}");
    }
}

#[test]
fn a_limit_of_address_space_is_an_error_with_the_amount() {
    let place = Place::new();
    let line = H2D.replace("--sizes 1MiB", "--sizes 1GiB");
    let mut command = place.command(&line);
    limit(&mut command, libc::RLIMIT_AS, 1 << 30);
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(!ended(&place, &ran, "1 GiB of addresses"));
    assert!(ran.stderr.contains("GiB") && ran.stderr.contains("ENOMEM"), "{ran:?}");

    // Enough for small buffers.
    let place = Place::new();
    let mut command = place.command(H2D);
    limit(&mut command, libc::RLIMIT_AS, 1 << 30);
    assert!(ended(&place, &Ran::of(&mut command), "small buffers"));
}

#[test]
fn a_sandbox_without_binding_measures_nothing_and_says_why() {
    let place = Place::new();
    let mut command = place.command(H2D);
    refuse(&mut command, &[libc::SYS_sched_setaffinity], libc::EPERM);
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stderr.contains("EPERM") && ran.stderr.contains("CPU"), "{ran:?}");
    ran.json();

    // The census says so of every CPU.
    let mut command = place.command("affinity --json");
    refuse(&mut command, &[libc::SYS_sched_setaffinity], libc::EPERM);
    let ran = Ran::of(&mut command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for cpu in ran.json()["cpus"].as_array().unwrap() {
        assert_eq!(cpu["bindable"], false, "{cpu}");
        assert!(cpu["reason"].as_str().unwrap().contains("EPERM"), "{cpu}");
    }
}

#[test]
fn a_kernel_without_a_call_is_told_by_its_name() {
    for (call, errno, name) in [
        (libc::SYS_memfd_create, libc::ENOSYS, "memfd_create"),
        (libc::SYS_mlock, libc::EPERM, ""),
        (libc::SYS_flock, libc::ENOLCK, ""),
        (libc::SYS_fdatasync, libc::EIO, "affinity.json: Input/output error"),
    ] {
        let place = Place::new();
        let mut command = place.command(H2D);
        refuse(&mut command, &[call], errno);
        let ran = Ran::of(&mut command);
        let whole = ended(&place, &ran, name);
        assert_eq!(whole, name.is_empty(), "{ran:?}");
        if !whole {
            assert!(ran.stderr.contains(name), "{ran:?}");
        } else if call == libc::SYS_mlock {
            let folder = Folder::read(&place.path("out"));
            assert!(folder.points.iter().all(|p| p.pinned.as_deref() == Some("pageable")));
        }
    }
}

/// A small /dev/shm, as containers have, with nothing left in it.
#[test]
fn a_small_dev_shm_is_not_needed() {
    let Some([a, b]) = two_cpus() else { return };
    let place = Place::new();
    let script = "mount -t tmpfs -o size=64m tmpfs /dev/shm || exit 77\n\"$@\"\ncode=$?\n\
                  [ -z \"$(ls -A /dev/shm)\" ] || exit 79\nexit $code";
    let sweep = place.command(&format!(
        "core-pair --quiet --json --backend host --sizes 64MiB --rank0-cpus {a} --rank1-cpus {b} \
         --repeats 1 --out @out"
    ));
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]).arg(sweep.get_program()).args(sweep.get_args());
    let Ok(output) = command.output() else {
        println!("skipped: no unshare");
        return;
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(77) || stderr.starts_with("unshare: ") {
        println!("skipped: no mount namespace can be had here: {stderr}");
        return;
    }
    assert!(matches!(output.status.code(), Some(0 | 1)), "{stderr}");
    assert_complete(&place.path("out"), &[64 << 20], [&[a], &[b]], 1);
    assert_nothing_left(&place);
}
