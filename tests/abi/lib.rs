//! Holds generated declarations against real headers.
//!
//! The declarations are read from the Rust text, turned into `static_assert`s, and compiled by the
//! C++ compiler behind the headers: it compares names, values, sizes, offsets and types.
#![allow(
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    reason = "the tests are the only callers"
)]

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use syn::{Expr, GenericArgument, Item, Lit, PathArguments, ReturnType, Stmt, Type};

/// Something that a header has to agree with.
#[derive(Debug, Clone)]
pub enum Check {
    /// A macro, constant or enumerator.
    Constant {
        /// Its name.
        name: String,
        /// Our value.
        value: i64,
    },
    /// A name of a type: an enum where the header has one, else the type itself.
    Alias {
        /// Its name.
        name: String,
        /// Our type in C++.
        c_type: String,
    },
    /// Bytes and alignment of a structure.
    Layout {
        /// Its name.
        name: String,
        /// Bytes.
        size: u64,
        /// Alignment in bytes.
        align: u64,
    },
    /// A member of a structure.
    Field {
        /// Name of the structure.
        name: String,
        /// Name of the member.
        field: String,
        /// Offset in bytes.
        offset: u64,
        /// Its type in C++, which is not compared where empty.
        c_type: String,
    },
    /// A function.
    Function {
        /// Its name.
        name: String,
        /// Our result in C++.
        result: String,
        /// Our parameters in C++.
        parameters: Vec<String>,
    },
}

impl Check {
    /// The name that has to be declared for the comparison to be possible.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Constant { name, .. }
            | Self::Alias { name, .. }
            | Self::Layout { name, .. }
            | Self::Field { name, .. }
            | Self::Function { name, .. } => name,
        }
    }

    /// The assertion, with a message that names what differs.
    fn assertion(&self) -> String {
        let (condition, what) = match self {
            Self::Constant { name, value } => {
                (format!("static_cast<long long>({name}) == {value}LL"), name.clone())
            }
            Self::Alias { name, c_type } => {
                (format!("same_alias<{name}, {c_type}>()"), name.clone())
            }
            Self::Layout { name, size, align } => (
                format!("sizeof({name}) == {size} && alignof({name}) == {align}"),
                format!("size of {name}"),
            ),
            Self::Field { name, field, offset, c_type } => {
                let mut condition = format!("offsetof({name}, {field}) == {offset}");
                if !c_type.is_empty() {
                    let _ = write!(
                        condition,
                        " && std::is_same<decltype({name}::{field}), as_type<{c_type}>>::value"
                    );
                }
                (condition, format!("{name}::{field}"))
            }
            Self::Function { name, result, parameters } => (
                format!(
                    "std::is_same<decltype(&::{name}), {result} (*)({})>::value",
                    parameters.join(", ")
                ),
                name.clone(),
            ),
        };
        format!("static_assert({condition}, \"abi: {what}\");\n")
    }
}

const PRELUDE: &str = r"
#include <cstddef>
#include <cstdint>
#include <type_traits>

template <typename T> using as_type = T;

// An enum of the header counts as the integer that passes for it.
template <typename T, typename Ours, bool Enum = std::is_enum<T>::value> struct alias;
template <typename T, typename Ours> struct alias<T, Ours, true> {
    static constexpr bool value =
        std::is_same<typename std::underlying_type<T>::type, Ours>::value;
};
template <typename T, typename Ours> struct alias<T, Ours, false> {
    static constexpr bool value = std::is_same<T, Ours>::value;
};
template <typename T, typename Ours> constexpr bool same_alias() { return alias<T, Ours>::value; }
";

/// Headers to compare with.
#[derive(Debug, Clone)]
pub struct Headers {
    /// Folders for `-I`.
    pub folders: Vec<PathBuf>,
    /// What to include.
    pub includes: Vec<String>,
}

/// What a comparison found, where nothing differs.
#[derive(Debug, Clone)]
pub struct Report {
    /// How many checks were compared.
    pub compared: usize,
    /// What the headers do not declare, in the order of the checks.
    pub absent: Vec<Check>,
}

impl Report {
    /// The functions that the headers do not declare.
    #[must_use]
    pub fn absent_functions(&self) -> Vec<&str> {
        let functions = self.absent.iter().filter(|check| matches!(check, Check::Function { .. }));
        functions.map(Check::name).collect()
    }
}

impl Headers {
    /// Compares what the headers declare; the error is what the compiler says.
    pub fn compare(&self, checks: &[Check]) -> Result<Report, String> {
        let includes: String =
            self.includes.iter().map(|header| format!("#include <{header}>\n")).collect();
        // Once for what is declared, once for what is defined as a macro.
        let mut declared = self.compile(&["-E", "-P"], &includes)?;
        declared += &self.compile(&["-E", "-P", "-dM"], &includes)?;
        let declared: HashSet<&str> =
            declared.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).collect();

        let (present, absent): (Vec<_>, Vec<_>) =
            checks.iter().partition(|check| declared.contains(check.name()));
        let mut source = includes + PRELUDE;
        for check in &present {
            source += &check.assertion();
        }
        self.compile(&["-fsyntax-only", "-fmax-errors=0"], &source)?;
        Ok(Report { compared: present.len(), absent: absent.into_iter().cloned().collect() })
    }

    fn compile(&self, arguments: &[&str], source: &str) -> Result<String, String> {
        let mut child = Command::new("c++")
            .args(["-std=c++17", "-x", "c++", "-Wno-deprecated-declarations"])
            .args(["-Wno-invalid-offsetof"])
            .args(arguments)
            .args(self.folders.iter().map(|folder| format!("-I{}", folder.display())))
            .arg("-")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("c++ does not start: {error}"))?;
        let mut input = child.stdin.take().ok_or("c++ has no input")?;
        // Read while writing, or both sides could wait for the other.
        let source = source.to_owned();
        let writer = std::thread::spawn(move || input.write_all(source.as_bytes()));
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        writer.join().map_err(|_| "the writer panicked")?.map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }
}

/// The checks of a file that bindgen wrote.
pub fn checks_of(rust: &str) -> Result<Vec<Check>, String> {
    let file = syn::parse_file(rust).map_err(|error| error.to_string())?;
    let mut checks = Vec::new();
    let layouts = layouts(&file.items);
    for item in &file.items {
        match item {
            Item::Const(item) if item.ident != "_" => {
                let value = integer(&item.expr)
                    .ok_or_else(|| format!("{} has no integer value", item.ident))?;
                checks.push(Check::Constant { name: item.ident.to_string(), value });
            }
            // Opaque, because it grows with every release.
            Item::Type(item) if item.ident != "HcclCommConfig" => {
                let c_type = c_type(&item.ty)?;
                checks.push(Check::Alias { name: item.ident.to_string(), c_type });
            }
            Item::Struct(item) => {
                let name = item.ident.to_string();
                let mut fields = Vec::new();
                for field in &item.fields {
                    let field_name = field.ident.as_ref().ok_or("a tuple structure")?.to_string();
                    if let Some(function) = function(&field_name, &field.ty)? {
                        checks.push(function);
                    } else if !field_name.starts_with('_') {
                        fields.push((field_name, c_type(&field.ty)?));
                    }
                }
                if fields.is_empty() {
                    continue;
                }
                let number = |what: &str| {
                    let found = layouts.iter().find(|(text, _)| text == what);
                    found.map(|&(_, number)| number).ok_or_else(|| format!("no {what}"))
                };
                checks.push(Check::Layout {
                    size: number(&format!("Size of {name}"))?,
                    align: number(&format!("Alignment of {name}"))?,
                    name: name.clone(),
                });
                for (field, c_type) in fields {
                    let offset = number(&format!("Offset of field: {name}::{field}"))?;
                    // bindgen's way around a keyword of Rust.
                    let field = field.trim_end_matches('_').to_owned();
                    checks.push(Check::Field { name: name.clone(), field, offset, c_type });
                }
            }
            _ => {}
        }
    }
    Ok(checks)
}

/// The numbers that bindgen lets rustc assert: `["Size of X"][size_of::<X>() - 16usize];`.
fn layouts(items: &[Item]) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    for item in items {
        let Item::Const(item) = item else { continue };
        let Expr::Block(block) = &*item.expr else { continue };
        for statement in &block.block.stmts {
            let Stmt::Expr(Expr::Index(index), _) = statement else { continue };
            let (Expr::Array(array), Expr::Binary(binary)) = (&*index.expr, &*index.index) else {
                continue;
            };
            let Some(Expr::Lit(text)) = array.elems.first() else { continue };
            let (Lit::Str(text), Some(number)) = (&text.lit, integer(&binary.right)) else {
                continue;
            };
            if let Ok(number) = number.try_into() {
                found.push((text.value(), number));
            }
        }
    }
    found
}

fn integer(expression: &Expr) -> Option<i64> {
    match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(number) => number.base10_parse().ok(),
            _ => None,
        },
        Expr::Unary(unary) if matches!(unary.op, syn::UnOp::Neg(_)) => {
            integer(&unary.expr).map(|number| -number)
        }
        _ => None,
    }
}

/// The function of a field `Result<unsafe extern "C" fn(..) -> .., Error>`.
fn function(name: &str, ty: &Type) -> Result<Option<Check>, String> {
    let Type::Path(path) = ty else { return Ok(None) };
    let Some(segment) = path.path.segments.last().filter(|s| s.ident == "Result") else {
        return Ok(None);
    };
    let PathArguments::AngleBracketed(arguments) = &segment.arguments else { return Ok(None) };
    let Some(GenericArgument::Type(Type::BareFn(function))) = arguments.args.first() else {
        return Ok(None);
    };
    let result = match &function.output {
        ReturnType::Default => "void".to_owned(),
        ReturnType::Type(_, ty) => c_type(ty)?,
    };
    let parameters =
        function.inputs.iter().map(|input| c_type(&input.ty)).collect::<Result<_, _>>()?;
    Ok(Some(Check::Function { name: name.to_owned(), result, parameters }))
}

/// A type of the bindings in C++.
fn c_type(ty: &Type) -> Result<String, String> {
    match ty {
        Type::Ptr(pointer) => {
            let target = c_type(&pointer.elem)?;
            let qualifier = if pointer.const_token.is_some() { " const" } else { "" };
            Ok(format!("{target}{qualifier} *"))
        }
        Type::Array(array) => {
            let length = integer(&array.len).ok_or("an array of unknown length")?;
            Ok(format!("{}[{length}]", c_type(&array.elem)?))
        }
        Type::Path(path) => {
            let name = path.path.segments.last().ok_or("an empty path")?.ident.to_string();
            Ok(match name.as_str() {
                "c_void" => "void",
                "c_char" => "char",
                "c_uchar" => "unsigned char",
                "c_int" => "int",
                "c_uint" => "unsigned int",
                "c_ulong" => "unsigned long",
                "c_ulonglong" => "unsigned long long",
                "i8" => "int8_t",
                "u8" => "uint8_t",
                "i32" => "int32_t",
                "u32" => "uint32_t",
                "i64" => "int64_t",
                "u64" => "uint64_t",
                "usize" => "size_t",
                "f32" => "float",
                other => other,
            }
            .to_owned())
        }
        _ => Err("a type that this comparison does not know".to_owned()),
    }
}

/// The headers of the Python package `torch_npu`, the newest release without a `version`.
///
/// They are downloaded once per target folder and never leave it. The error says why that was
/// impossible.
pub fn wheel_headers(version: Option<&str>, scratch: &Path) -> Result<Headers, String> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);

    let folder = scratch.join(format!("torch_npu-{}", version.unwrap_or("newest")));
    if !folder.join("complete").is_file() {
        // Renamed when complete, because other processes may do the same.
        let partial = scratch.join(format!("torch_npu-partial-{}", std::process::id()));
        let result = download(version, &partial).and_then(|()| {
            let renamed = fs::rename(&partial, &folder);
            if folder.join("complete").is_file() {
                return Ok(());
            }
            renamed.map_err(|error| format!("{}: {error}", folder.display()))
        });
        // Nothing is left of it where all went well.
        drop(fs::remove_dir_all(&partial));
        result?;
    }
    let include = folder.join("torch_npu/include");
    let third = include.join("third_party");
    Ok(Headers {
        folders: vec![third.join("acl/inc"), third.join("hccl/inc"), include],
        includes: vec!["acl/acl.h".to_owned(), "hccl/hccl.h".to_owned()],
    })
}

fn download(version: Option<&str>, folder: &Path) -> Result<(), String> {
    // Somebody who only wants to know whether the tests pass is not to fetch 70 MB by surprise.
    if !["CI", "CLUSTER_HEALTH_ABI_DOWNLOAD"].iter().any(|name| std::env::var_os(name).is_some()) {
        return Err("set CLUSTER_HEALTH_ABI_DOWNLOAD=1 to fetch about 70 MB".to_owned());
    }
    let requirement =
        version.map_or("torch_npu".to_owned(), |version| format!("torch_npu=={version}"));
    // The headers are the same for every Python and processor; one that has all releases.
    let output = Command::new("python3")
        .args(["-m", "pip", "download", &requirement, "--no-deps", "--quiet"])
        .args(["--only-binary=:all:", "--implementation=cp", "--python-version=311"])
        .args(["--platform=manylinux_2_28_x86_64", "--disable-pip-version-check", "--dest"])
        .arg(folder)
        .output()
        .map_err(|error| format!("python3 does not start: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let say = |error: std::io::Error| format!("{}: {error}", folder.display());
    for entry in fs::read_dir(folder).map_err(say)? {
        let wheel = entry.map_err(say)?.path();
        if wheel.extension().is_some_and(|extension| extension == "whl") {
            extract_headers(&wheel, folder)?;
            fs::remove_file(&wheel).map_err(say)?;
        }
    }
    fs::write(folder.join("complete"), "").map_err(say)
}

fn extract_headers(wheel: &Path, folder: &Path) -> Result<(), String> {
    let say = |error: std::io::Error| format!("{}: {error}", wheel.display());
    let file = fs::File::open(wheel).map_err(say)?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| error.to_string())?;
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(|error| error.to_string())?;
        let Some(path) = entry.enclosed_name() else { continue };
        let header = path.extension().is_some_and(|extension| extension == "h");
        if !header || !path.starts_with("torch_npu/include/third_party") {
            continue;
        }
        let target = folder.join(&path);
        fs::create_dir_all(target.parent().unwrap_or(folder)).map_err(say)?;
        let mut text = Vec::new();
        entry.read_to_end(&mut text).map_err(say)?;
        fs::write(target, text).map_err(say)?;
    }
    Ok(())
}
