//! An independent client: C, the vendor's headers, linked like any program to the libraries.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::support::install;

const WHEEL: &str = "torch_npu==2.7.1";

/// Unpacks the headers of the wheel; they are downloaded for this test only and never kept.
const UNPACK: &str = "
import glob, sys, zipfile
for wheel in glob.glob(sys.argv[1] + '/*.whl'):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if '/third_party/' in name and name.endswith('.h'):
                archive.extract(name, sys.argv[1])
";

fn quietly(command: &mut Command) -> Result<(), String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The folder `torch_npu/include` of the wheel: `TORCH_NPU_INCLUDE`, or else downloaded.
fn headers() -> Result<PathBuf, String> {
    if let Some(folder) = env::var_os("TORCH_NPU_INCLUDE") {
        return Ok(folder.into());
    }
    let folder =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join("witness").join(WHEEL.replace("==", "-"));
    let include = folder.join("torch_npu/include");
    if !include.join("third_party/hccl/inc/hccl/hccl.h").exists() {
        if !["CI", "CLUSTER_HEALTH_ABI_DOWNLOAD"].iter().any(|name| env::var_os(name).is_some()) {
            return Err("set CLUSTER_HEALTH_ABI_DOWNLOAD=1 to fetch 25 MB".to_owned());
        }
        fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        let arguments = "-m pip download --quiet --no-deps --only-binary=:all: --python-version 3.11 \
                         --platform manylinux_2_28_x86_64";
        quietly(
            Command::new("python3")
                .args(arguments.split_whitespace())
                .arg("-d")
                .arg(&folder)
                .arg(WHEEL),
        )?;
        quietly(Command::new("python3").args(["-c", UNPACK]).arg(&folder))?;
    }
    Ok(include)
}

#[test]
fn a_c_program_with_the_real_headers_gets_right_data() {
    let headers = match headers() {
        Ok(headers) => headers,
        Err(why) => {
            println!("skipped: no headers of {WHEEL}: {why}");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    install(folder.path(), &["libascendcl.so", "libhccl.so"]);
    let program = folder.path().join("witness");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sim/witness.c");
    // The headers of HCCL are not C: as C++ they parse.
    let compiled = quietly(
        Command::new(env::var_os("CXX").unwrap_or_else(|| "g++".into()))
            .args(["-x", "c++", "-std=c++17", "-Wall"])
            .arg(&source)
            .arg("-I")
            .arg(&headers)
            .arg("-I")
            .arg(headers.join("third_party/acl/inc"))
            .arg("-I")
            .arg(headers.join("third_party/hccl/inc"))
            .arg("-L")
            .arg(folder.path())
            .args(["-lascendcl", "-lhccl", "-o"])
            .arg(&program),
    );
    compiled.unwrap();
    let output = Command::new(&program)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("ASCEND_SIM_LINKS", "h2d,gbps=0.1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}{errors}");
    assert!(text.contains("rank 0: copy") && text.contains("rank 1: copy"), "{text}");
}
