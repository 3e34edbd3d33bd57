//! The fault list and the stub.

use std::{ffi::CString, process::Command, ptr, thread, time::Duration};

use crate::library::{H2D, Sim};

#[test]
fn the_nth_call_fails_and_only_on_the_device_named() {
    let sim = Sim::ready(&[("FAULTS", "aclrtMalloc:2:207001;aclrtMemset@1:2+:507899")]);
    let mut out = ptr::null_mut();
    assert_eq!(sim.aclrtMalloc(&raw mut out, 8, 0), 0);
    assert_eq!(sim.aclrtMalloc(&raw mut out, 8, 0), 207_001);
    assert_eq!(sim.aclrtMalloc(&raw mut out, 8, 0), 0);
    for _ in 0..3 {
        assert_eq!(sim.aclrtMemset(out, 8, 0, 8), 0, "device 0 is well");
    }
    assert_eq!(sim.aclrtSetDevice(1), 0);
    assert_eq!(sim.aclrtMalloc(&raw mut out, 8, 0), 0);
    let codes: Vec<i32> = (0..3).map(|_| sim.aclrtMemset(out, 8, 0, 8)).collect();
    assert_eq!(codes, [0, 507_899, 507_899]);
    sim.set("FAULTS", "");
    assert_eq!(sim.aclrtMemset(out, 8, 0, 8), 0);
}

#[test]
fn corruption_changes_one_bit() {
    let sim = Sim::ready(&[("FAULTS", "aclrtMemcpy:1:corrupt")]);
    let bytes = vec![0_u8; 100];
    let device = sim.upload(&bytes);
    let found = sim.download(device, 100);
    assert_eq!(found.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
}

#[test]
fn a_hung_call_returns_when_released() {
    let sim = Sim::ready(&[("FAULTS", "aclrtSynchronizeStream:1:hang")]);
    let stream = sim.stream();
    thread::scope(|scope| {
        let mut context = ptr::null_mut();
        assert_eq!(sim.aclrtGetCurrentContext(&raw mut context), 0);
        let (context, stream) = (context.expose_provenance(), stream.expose_provenance());
        let sim = &sim;
        let hung = scope.spawn(move || {
            assert_eq!(sim.aclrtSetCurrentContext(ptr::with_exposed_provenance_mut(context)), 0);
            sim.aclrtSynchronizeStream(ptr::with_exposed_provenance_mut(stream))
        });
        thread::sleep(Duration::from_millis(50));
        assert!(!hung.is_finished());
        sim.set("RELEASE", "1");
        assert_eq!(hung.join().unwrap(), 0);
    });
}

#[test]
fn the_stub_answers_with_its_code_only() {
    let sim = Sim::new(&[("STUB", "1")]);
    assert_eq!(sim.aclInit(ptr::null()), 100_039);
    let mut count = 0;
    assert_eq!(sim.aclrtGetDeviceCount(&raw mut count), 100_039);
    assert!(sim.aclrtGetSocName().is_null());
}

#[test]
fn settings_that_are_not_understood_are_refused() {
    let sim = Sim::new(&[]);
    for (key, value) in [
        ("DEVICES", "two"),
        ("LINKS", "h2d,gbps=0"),
        ("LINKS", "usb,gbps=1"),
        ("FAULTS", "aclrtMalloc:hang"),
        ("NO_SUCH", "1"),
    ] {
        let (k, v) = (CString::new(key).unwrap(), CString::new(value).unwrap());
        assert_eq!(sim.ascend_sim_configure(k.as_ptr(), v.as_ptr()), 100_000);
        assert!(sim.message().contains(key), "{key}");
    }
}

/// Runs `child` below in a process of its own.
fn child(environment: &[(&str, &str)]) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "faults::child_of_the_tests", "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

#[test]
#[ignore = "run by other tests in a process of its own"]
fn child_of_the_tests() {
    let sim = Sim::new(&[]);
    let code = sim.aclInit(ptr::null());
    println!("aclInit {code} {}", sim.message());
    if code == 0 {
        assert_eq!(sim.aclrtSetDevice(3), 0);
        let host = [0_u8; 8];
        sim.aclrtMemcpy(sim.malloc(8), 8, host.as_ptr().cast(), 8, H2D);
        println!("alive");
    }
}

#[test]
fn the_environment_configures_and_a_crash_is_one() {
    let good = child(&[("ASCEND_SIM_DEVICES", "4")]);
    assert!(good.status.success() && String::from_utf8_lossy(&good.stdout).contains("alive"));
    let crash = child(&[("ASCEND_SIM_DEVICES", "4"), ("ASCEND_SIM_FAULTS", "aclrtMemcpy:1:crash")]);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&crash.status), Some(libc::SIGABRT));
    let typo = child(&[("ASCEND_SIM_DEVICE", "4")]);
    let text = String::from_utf8_lossy(&typo.stdout).into_owned();
    assert!(text.contains("aclInit 500000") && text.contains("ASCEND_SIM_DEVICE"), "{text}");
}
