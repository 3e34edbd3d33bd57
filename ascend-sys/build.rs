//! Does nothing, except with feature `bindgen`: then it makes the declarations anew, from the
//! headers of the vendor where there are any, completed by those below `include/`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "bindgen")]
    generate::run();
}

#[cfg(feature = "bindgen")]
#[expect(clippy::unwrap_used, reason = "a build script reports by failing")]
mod generate {
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::{env, fs};

    /// One generated file.
    struct Module {
        name: &'static str,
        /// Struct that holds the addresses of its functions.
        table: &'static str,
        /// The header of the vendor, relative to one of the include folders.
        vendor: &'static [&'static str],
        functions: &'static str,
    }

    const MODULES: [Module; 4] = [
        Module { name: "acl", table: "AclTable", vendor: &["acl/acl.h"], functions: "acl.*" },
        Module {
            name: "hccl",
            table: "HcclTable",
            vendor: &["hccl/hccl.h", "hccl/hccl_comm.h"],
            functions: "Hccl.*",
        },
        Module {
            name: "dcmi",
            table: "DcmiTable",
            vendor: &["dcmi_interface_api.h"],
            functions: "dcmi.*",
        },
        Module {
            name: "aclnn",
            table: "AclnnTable",
            vendor: &["acl/acl.h", "aclnn/acl_meta.h", "aclnnop/aclnn_matmul.h"],
            functions: "acl.*",
        },
    ];

    pub(super) fn run() {
        for name in ["ASCEND_SYS_INCLUDE_DIR", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        println!("cargo::rerun-if-changed=include");
        let ours = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("include");
        let out = PathBuf::from(env::var_os("OUT_DIR").unwrap());
        let vendor = vendor_folders();
        for module in &MODULES {
            bindings(module, &ours, &vendor, &out);
        }
    }

    /// Where the headers of the vendor are: the first of the candidates that has any.
    fn vendor_folders() -> Vec<PathBuf> {
        // Asked for by name, so what is not there is an error and not a reason to look elsewhere.
        if let Some(folder) = env::var_os("ASCEND_SYS_INCLUDE_DIR") {
            let folder = PathBuf::from(folder);
            let found = layouts(&folder);
            let own = folder.join("acl_min.h").is_file();
            assert!(
                own || !found.is_empty(),
                "ASCEND_SYS_INCLUDE_DIR={} has no acl/acl.h",
                folder.display()
            );
            return found;
        }
        let homes = ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"].iter().filter_map(env::var_os);
        let installed = ["/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"];
        homes
            .map(PathBuf::from)
            .chain(installed.map(PathBuf::from))
            .map(|home| layouts(&home.join("include")))
            .find(|found| !found.is_empty())
            .unwrap_or_default()
    }

    /// The include folders of a toolkit, or of the Python package `torch_npu`.
    fn layouts(folder: &Path) -> Vec<PathBuf> {
        let third = folder.join("third_party");
        let candidates = [folder.to_path_buf(), third.join("acl/inc"), third.join("hccl/inc")];
        let has_acl = candidates.iter().any(|c| c.join("acl/acl.h").is_file());
        if has_acl { candidates.into_iter().filter(|c| c.is_dir()).collect() } else { Vec::new() }
    }

    fn bindings(module: &Module, ours: &Path, vendor: &[PathBuf], out: &Path) {
        let own_header = ours.join(format!("{}_min.h", module.name));
        let own_text = fs::read_to_string(&own_header).unwrap();
        let includes: Vec<&str> = module
            .vendor
            .iter()
            .copied()
            .filter(|header| vendor.iter().any(|folder| folder.join(header).is_file()))
            .collect();

        let mut wrapper: String =
            includes.iter().map(|header| format!("#include <{header}>\n")).collect();
        let known = if includes.is_empty() { String::new() } else { text_below(vendor) };
        for guard in guards(&own_text) {
            if words(&known).any(|word| word == guard) {
                wrapper.push_str(&format!("#define ASCEND_SYS_HAVE_{guard}\n"));
            }
        }
        wrapper.push_str(&format!("#include \"{}_min.h\"\n", module.name));

        let mut builder = bindgen::Builder::default()
            .header_contents(&format!("{}_wrapper.h", module.name), &wrapper)
            // The headers of HCCL and of some releases of ACL do not parse as C.
            .clang_args(["-x", "c++", "-std=c++17"])
            .clang_args(compiler_headers())
            .clang_arg(format!("-I{}", ours.display()))
            .clang_args(vendor.iter().map(|folder| format!("-I{}", folder.display())))
            .dynamic_library_name(module.table)
            .wrap_unsafe_ops(true)
            .prepend_enum_name(false)
            .layout_tests(true)
            .generate_comments(false)
            .sort_semantically(true)
            .use_core()
            .opaque_type("HcclCommConfig.*")
            .rust_target(bindgen::RustTarget::stable(88, 0).unwrap())
            .rust_edition(bindgen::RustEdition::Edition2024)
            .formatter(bindgen::Formatter::Prettyplease);
        // Only what our own header names, whatever else the headers of the vendor declare.
        for name in functions(&own_text, module.functions) {
            builder = builder.allowlist_function(name);
        }
        for guard in guards(&own_text) {
            builder = builder.allowlist_type(guard).allowlist_var(guard);
        }
        let text = builder
            .generate()
            .unwrap_or_else(|error| panic!("bindgen failed on {}: {error}", module.name))
            .to_string();
        let file = out.join(format!("{}.rs", module.name));
        fs::write(file, without_methods(&text, module.table)).unwrap();
    }

    /// Drops the methods of the table: they panic where a symbol is missing, and its fields say
    /// the same as a `Result`.
    fn without_methods(text: &str, table: &str) -> String {
        let mut kept = String::new();
        let (mut inside, mut skip) = (false, false);
        for line in text.lines() {
            inside |= line == format!("impl {table} {{");
            if inside && line.starts_with("    pub unsafe fn ") {
                skip = !line.contains(" from_library<");
            }
            if inside && line == "}" {
                (inside, skip) = (false, false);
            }
            if !skip {
                kept.push_str(line);
                kept.push('\n');
            }
        }
        kept
    }

    /// The compiler's own headers (`stddef.h`), for a libclang that comes without; a complete one
    /// finds its own first.
    fn compiler_headers() -> Vec<String> {
        let output = Command::new("cc").arg("-print-file-name=include").output();
        let folder = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        folder.map_or_else(|_| Vec::new(), |folder| vec!["-idirafter".to_owned(), folder])
    }

    /// The names that our header declares unless the vendor's did.
    fn guards(text: &str) -> Vec<&str> {
        text.lines().filter_map(|line| line.strip_prefix("#ifndef ASCEND_SYS_HAVE_")).collect()
    }

    /// The functions that our header declares.
    fn functions<'a>(text: &'a str, pattern: &str) -> Vec<&'a str> {
        let prefix = pattern.trim_end_matches(".*");
        text.lines()
            .filter(|line| !line.starts_with([' ', '#', '/', '}']) && !line.starts_with("typedef"))
            .filter_map(|line| line.split_once('('))
            .filter_map(|(head, _)| head.rsplit([' ', '*']).next())
            .filter(|name| name.starts_with(prefix))
            .collect()
    }

    fn words(text: &str) -> impl Iterator<Item = &str> {
        text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
    }

    /// The text of every header of ACL, HCCL, DCMI and aclnn.
    fn text_below(folders: &[PathBuf]) -> String {
        let mut text = String::new();
        for folder in folders {
            for part in ["", "acl", "hccl", "aclnn", "aclnnop", "acl/error_codes"] {
                let Ok(entries) = fs::read_dir(folder.join(part)) else { continue };
                for entry in entries.flatten() {
                    if entry.path().extension().is_some_and(|extension| extension == "h") {
                        text += &fs::read_to_string(entry.path()).unwrap_or_default();
                    }
                }
            }
        }
        text
    }
}
