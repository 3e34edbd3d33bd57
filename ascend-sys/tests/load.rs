//! Loading against libraries that a C compiler makes on the spot.

#![allow(clippy::unwrap_used, reason = "a test reports by failing")]

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use ascend_sys::acl::AclTable;
use ascend_sys::function;
use ascend_sys::hccl::HcclTable;
use ascend_sys::load::{self, Acl, Dcmi, Hccl, LoadError, LoadErrorKind, Loaded, Search, Table};
use ascend_sys::status::{self, Family, Status};

/// Compiles `source` to `folder/name`.
fn library(folder: &Path, name: &str, source: &str, arguments: &[&str]) {
    std::fs::create_dir_all(folder).unwrap();
    let file = folder.join(format!("{name}.c"));
    std::fs::write(&file, source).unwrap();
    let output = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,--no-as-needed", "-o"])
        .arg(folder.join(name))
        .arg(&file)
        .arg(format!("-L{}", folder.display()))
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// C functions of the table's names that all return `code`.
fn functions<T: Table>(code: i32, keep: impl Fn(&str) -> bool) -> String {
    let mut source = String::new();
    for symbol in T::SYMBOLS.iter().filter(|symbol| keep(symbol.name)) {
        writeln!(source, "long {}(void) {{ return {code}; }}", symbol.name).unwrap();
    }
    source
}

fn failure<T: Table>(folder: &Path) -> LoadError {
    Loaded::<T>::load(&Search::in_folder(folder)).expect_err("this must not load")
}

#[test]
fn missing_folder_names_every_path_and_says_what_to_do() {
    let error = failure::<AclTable>(Path::new("/nonexistent"));
    assert_eq!(error.kind, LoadErrorKind::NotInstalled);
    let text = error.to_string();
    for path in ["/nonexistent/libascendcl.so: ", "/nonexistent/libacl_rt.so: "] {
        assert!(text.contains(path), "{text}");
    }
    assert!(text.contains("No such file or directory"), "{text}");
    assert!(text.contains("set_env.sh"), "{text}");
}

#[test]
fn garbage_is_refused_in_the_words_of_the_loader() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libascendcl.so"), "not a library at all ".repeat(50))
        .unwrap();
    let error = failure::<AclTable>(folder.path());
    assert_eq!(error.kind, LoadErrorKind::Refused);
    assert!(error.to_string().contains("invalid ELF header"), "{error}");
}

#[test]
fn required_symbols_are_reported_together() {
    let folder = tempfile::tempdir().unwrap();
    let gone = ["aclrtMalloc", "aclrtRecordEvent"];
    let source = functions::<AclTable>(0, |name| !gone.contains(&name));
    library(folder.path(), "libascendcl.so", &source, &[]);
    let error = failure::<AclTable>(folder.path());
    assert!(
        matches!(&error.kind, LoadErrorKind::MissingSymbols(names)
        if names.len() == 2 && gone.iter().all(|name| names.contains(name))),
        "{error}"
    );
    assert!(error.to_string().contains("8.1.RC1"), "{error}");
}

#[test]
fn optional_symbol_is_an_error_of_its_call() {
    let folder = tempfile::tempdir().unwrap();
    let source = functions::<AclTable>(0, |name| name != "aclrtHostRegisterV2");
    library(folder.path(), "libascendcl.so", &source, &[]);
    let acl = Acl::load(&Search::in_folder(folder.path())).unwrap();
    assert!(function!(acl, aclrtHostRegister).is_ok());
    let error = function!(acl, aclrtHostRegisterV2).unwrap_err();
    assert_eq!((error.name, error.library), ("aclrtHostRegisterV2", "libascendcl.so"));
    let absent: Vec<_> =
        acl.symbols().filter(|(_, found)| !found).map(|(symbol, _)| symbol.name).collect();
    assert_eq!(absent, ["aclrtHostRegisterV2"]);
    assert_eq!(acl.libraries().len(), 1);
    assert_eq!(acl.libraries()[0].path, folder.path().join("libascendcl.so"));
}

#[test]
fn library_of_the_new_layout_is_taken_where_the_old_one_is_absent() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), "libacl_rt.so", &functions::<AclTable>(0, |_| true), &[]);
    let acl = Acl::load(&Search::in_folder(folder.path())).unwrap();
    assert_eq!(acl.libraries()[0].name, "libacl_rt.so");
}

#[test]
fn absent_driver_has_its_own_message() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), "libascend_hal.so", "int hal;", &[]);
    let source = functions::<AclTable>(0, |_| true);
    library(folder.path(), "libascendcl.so", &source, &["-l:libascend_hal.so"]);
    std::fs::remove_file(folder.path().join("libascend_hal.so")).unwrap();
    let error = failure::<AclTable>(folder.path());
    assert_eq!(error.kind, LoadErrorKind::DriverMissing);
    assert!(error.to_string().contains("driver"), "{error}");
}

#[test]
fn other_absent_dependency_is_named() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), "libruntime.so", "int runtime;", &[]);
    let source = functions::<AclTable>(0, |_| true);
    library(folder.path(), "libascendcl.so", &source, &["-l:libruntime.so"]);
    std::fs::remove_file(folder.path().join("libruntime.so")).unwrap();
    let error = failure::<AclTable>(folder.path());
    assert_eq!(error.kind, LoadErrorKind::DependencyMissing("libruntime.so".into()));
}

#[test]
fn stub_is_recognised_by_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let devlib = folder.path().join("devlib");
    library(&devlib, "libascendcl.so", &functions::<AclTable>(100_039, |_| true), &[]);
    let error = failure::<AclTable>(&devlib);
    assert_eq!(error.kind, LoadErrorKind::StubLibrary);
    assert!(error.to_string().contains("LD_LIBRARY_PATH"), "{error}");
}

#[test]
fn stub_elsewhere_is_recognised_by_its_first_answer() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), "libascendcl.so", &functions::<AclTable>(100_039, |_| true), &[]);
    let acl = Acl::load(&Search::in_folder(folder.path())).unwrap();
    let init = function!(acl, aclInit).unwrap();
    // SAFETY: no configuration is a valid argument, and the function of this test ignores it.
    let code = unsafe { init(std::ptr::null()) };
    assert!(status::is_stub(code));
    assert!(Status::new(Family::Acl, code).advice().unwrap().contains("stub"));
}

#[test]
fn collectives_split_over_two_libraries_are_put_together() {
    let folder = tempfile::tempdir().unwrap();
    let operator = |name: &str| name == "HcclAllReduce" || !name.contains("Comm");
    library(folder.path(), "libhccl.so", &functions::<HcclTable>(1, operator), &[]);
    library(folder.path(), "libhcomm.so", &functions::<HcclTable>(2, |_| true), &[]);
    let hccl = Hccl::load(&Search::in_folder(folder.path())).unwrap();
    let names: Vec<_> = hccl.libraries().iter().map(|library| library.name).collect();
    assert_eq!(names, ["libhccl.so", "libhcomm.so"]);
    let barrier = function!(hccl, HcclBarrier).unwrap();
    let destroy = function!(hccl, HcclCommDestroy).unwrap();
    // SAFETY: the functions of this test ignore their arguments.
    let first = unsafe { barrier(std::ptr::null_mut(), std::ptr::null_mut()) };
    // SAFETY: as above.
    let second = unsafe { destroy(std::ptr::null_mut()) };
    assert_eq!((first, second), (1, 2));

    let alone = tempfile::tempdir().unwrap();
    library(alone.path(), "libhccl.so", &functions::<HcclTable>(1, operator), &[]);
    let error = failure::<HcclTable>(alone.path());
    assert!(error.to_string().contains("HcclCommDestroy"), "{error}");
}

#[test]
fn device_management_is_not_installed_here() {
    let folder = tempfile::tempdir().unwrap();
    let error = Dcmi::load(&Search::in_folder(folder.path())).unwrap_err();
    assert_eq!(error.attempts.len(), 1, "{error}");
}

#[test]
fn file_without_permission_is_told_from_an_absent_one() {
    use std::os::unix::fs::PermissionsExt as _;

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libascendcl.so");
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o000)).unwrap();
    if std::fs::read(&file).is_ok() {
        println!("skipped: this user may read everything");
        return;
    }
    assert_eq!(failure::<AclTable>(folder.path()).kind, LoadErrorKind::Permission);
}

/// Runs in the child of the test below, where the variable is set.
#[test]
#[ignore = "needs the variable; started by the next test"]
fn child_loads_once_for_all_threads() {
    let first: *const Acl = load::acl().unwrap();
    let address = first.addr();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                let again: *const Acl = load::acl().unwrap();
                assert_eq!(again.addr(), address);
            });
        }
    });
}

#[test]
fn variable_names_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), "libascendcl.so", &functions::<AclTable>(0, |_| true), &[]);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_loads_once_for_all_threads", "--ignored"])
        .env(load::FOLDER_VARIABLE, folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
