//! Finds and opens the libraries at run time.
//!
//! Each library is looked for by its plain name first, which is what `LD_LIBRARY_PATH` and
//! `set_env.sh` govern, then below `$ASCEND_HOME_PATH`, `$ASCEND_TOOLKIT_HOME` and the default
//! install folders. `CLUSTER_HEALTH_ASCEND_LIB_DIR` names one folder to look in and nowhere else:
//! it is how tests put the simulator in the place of the real libraries.
//!
//! Stub libraries (folders `devlib` and `stub`) are for linking only and passed over. What has been
//! opened stays open until the process ends: these libraries have threads of their own, which
//! unloading would pull the code away from.

use std::ffi::{CStr, OsStr, OsString};
use std::fmt::{self, Write as _};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use core::ffi::{c_char, c_int, c_void};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use once_cell::sync::OnceCell;

use crate::acl::AclTable;
use crate::aclnn::AclnnTable;
use crate::dcmi::DcmiTable;
use crate::hccl::HcclTable;

/// Variable that names the only folder to look in.
pub const FOLDER_VARIABLE: &str = "CLUSTER_HEALTH_ASCEND_LIB_DIR";

/// The runtime.
pub type Acl = Loaded<AclTable>;
/// The collectives.
pub type Hccl = Loaded<HcclTable>;
/// The device management.
pub type Dcmi = Loaded<DcmiTable>;
/// The matrix product.
pub type Aclnn = Loaded<AclnnTable>;

/// The runtime, opened at the first call that succeeds.
///
/// # Errors
///
/// When no library opens or it lacks a required symbol. A later call tries again.
pub fn acl() -> Result<&'static Acl, LoadError> {
    static LOADED: OnceCell<Acl> = OnceCell::new();
    LOADED.get_or_try_init(|| Loaded::load(&Search::from_env()))
}

/// The collectives, opened at the first call that succeeds. Nothing else opens them.
///
/// # Errors
///
/// As [`acl`].
pub fn hccl() -> Result<&'static Hccl, LoadError> {
    static LOADED: OnceCell<Hccl> = OnceCell::new();
    LOADED.get_or_try_init(|| Loaded::load(&Search::from_env()))
}

/// The device management, opened at the first call that succeeds.
///
/// # Errors
///
/// As [`acl`].
pub fn dcmi() -> Result<&'static Dcmi, LoadError> {
    static LOADED: OnceCell<Dcmi> = OnceCell::new();
    LOADED.get_or_try_init(|| Loaded::load(&Search::from_env()))
}

/// The matrix product, opened at the first call that succeeds.
///
/// # Errors
///
/// As [`acl`].
pub fn aclnn() -> Result<&'static Aclnn, LoadError> {
    static LOADED: OnceCell<Aclnn> = OnceCell::new();
    LOADED.get_or_try_init(|| Loaded::load(&Search::from_env()))
}

/// The address of a function of a [`Loaded`] library, by its C name, as a `Result`.
///
/// `function!(acl, aclrtMalloc)?` has the type of the C function; calling it is unsafe. An error is
/// a [`MissingSymbol`], which required symbols never give.
#[macro_export]
macro_rules! function {
    ($library:expr, $name:ident) => {
        match &$library.table().$name {
            ::core::result::Result::Ok(function) => ::core::result::Result::Ok(*function),
            ::core::result::Result::Err(_) => {
                ::core::result::Result::Err($library.missing(::core::stringify!($name)))
            }
        }
    };
}

/// Where to look for libraries.
#[derive(Debug, Clone)]
pub struct Search {
    /// `None` is the plain name: the dynamic loader's own search.
    places: Vec<Option<PathBuf>>,
    /// Only one folder, so the extra places of a library are left out.
    only: bool,
}

impl Search {
    /// What the environment of this process says.
    #[must_use]
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// One folder and nothing else, as [`FOLDER_VARIABLE`] does.
    #[must_use]
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self { places: vec![Some(folder.into())], only: true }
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        // A set but empty variable is how shells unset one for a single command.
        let variable = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(folder) = variable(FOLDER_VARIABLE) {
            return Self::in_folder(folder);
        }
        let homes = ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"].into_iter().filter_map(variable);
        let own = variable("HOME")
            .into_iter()
            .flat_map(|home| ["Ascend/cann", "Ascend/ascend-toolkit/latest"].map(|p| home.join(p)));
        let installed = [
            "/usr/local/Ascend/cann",
            "/usr/local/Ascend/ascend-toolkit/latest",
            "/opt/Ascend/cann",
        ];
        let mut places = vec![None];
        for root in homes.chain(own).chain(installed.map(PathBuf::from)) {
            let folder = Some(root.join("lib64"));
            if !places.contains(&folder) {
                places.push(folder);
            }
        }
        Self { places, only: false }
    }

    /// Where to look for `name`, in order.
    fn candidates(&self, name: &str, extra: &[&str]) -> Vec<PathBuf> {
        let extra = extra.iter().filter(|_| !self.only).map(|folder| Path::new(folder).join(name));
        self.places
            .iter()
            .map(|place| match place {
                Some(folder) => folder.join(name),
                None => PathBuf::from(name),
            })
            .chain(extra)
            .collect()
    }
}

/// A symbol that a library should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Symbol {
    /// Its C name.
    pub name: &'static str,
    /// Whether loading fails without it.
    pub required: bool,
}

/// A library that was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenedLibrary {
    /// Its file name.
    pub name: &'static str,
    /// The file that the dynamic loader took.
    pub path: PathBuf,
}

/// The functions of a library, or of several that share them.
pub struct Loaded<T> {
    table: T,
    libraries: Vec<OpenedLibrary>,
}

impl<T> fmt::Debug for Loaded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded").field("libraries", &self.libraries).finish_non_exhaustive()
    }
}

impl<T: Table> Loaded<T> {
    /// Opens the library where `search` says.
    ///
    /// # Errors
    ///
    /// When no library opens or none has all required symbols; the error lists each path that was
    /// tried.
    pub fn load(search: &Search) -> Result<Self, LoadError> {
        let mut attempts = Vec::new();
        let mut missing: Option<Vec<&'static str>> = None;
        for &name in T::NAMES {
            for path in search.candidates(name, T::FOLDERS) {
                let (mut table, library) = match open::<T>(name, &path) {
                    Ok(opened) => opened,
                    Err(problem) => {
                        attempts.push(Attempt { path, problem });
                        continue;
                    }
                };
                let mut libraries = vec![library];
                for &extra in T::EXTRA {
                    if extra == name || table.lacking().is_empty() {
                        continue;
                    }
                    // A release without this library is no error: what is missing says enough.
                    let found = search
                        .candidates(extra, T::FOLDERS)
                        .into_iter()
                        .find_map(|path| open::<T>(extra, &path).ok());
                    if let Some((mut other, library)) = found {
                        table.complete(&mut other);
                        libraries.push(library);
                    }
                }
                let lacking: Vec<_> = table
                    .lacking()
                    .into_iter()
                    .filter(|symbol| symbol.required)
                    .map(|symbol| symbol.name)
                    .collect();
                if lacking.is_empty() {
                    return Ok(Self { table, libraries });
                }
                let problem = format!("lacks {}", lacking.join(", "));
                attempts.push(Attempt { path, problem });
                missing.get_or_insert(lacking);
            }
        }
        let kind = missing.map_or_else(|| classify(&attempts), LoadErrorKind::MissingSymbols);
        Err(LoadError { library: T::NAMES.first().copied().unwrap_or_default(), kind, attempts })
    }

    /// The libraries that the functions come from, in the order in which they were opened.
    #[must_use]
    pub fn libraries(&self) -> &[OpenedLibrary] {
        &self.libraries
    }

    /// Every symbol that was looked for and whether it is there.
    pub fn symbols(&self) -> impl Iterator<Item = (Symbol, bool)> + '_ {
        let lacking = self.table.lacking();
        T::SYMBOLS.iter().map(move |symbol| (*symbol, !lacking.contains(symbol)))
    }

    /// For [`function!`](crate::function).
    #[doc(hidden)]
    #[must_use]
    pub const fn table(&self) -> &T {
        &self.table
    }

    /// For [`function!`](crate::function).
    #[doc(hidden)]
    #[must_use]
    #[cold]
    pub fn missing(&self, name: &'static str) -> MissingSymbol {
        let library = self.libraries.first().map_or("the library", |library| library.name);
        MissingSymbol { name, library }
    }
}

/// A function that this release of a library does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{library} has no {name}: this release of the toolkit is too old for it")]
#[non_exhaustive]
pub struct MissingSymbol {
    /// C name of the function.
    pub name: &'static str,
    /// File name of the library.
    pub library: &'static str,
}

/// Why a library could not be used.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoadError {
    /// File name of the library that was looked for.
    pub library: &'static str,
    /// What it comes down to.
    pub kind: LoadErrorKind,
    /// Every path that was tried, in order.
    pub attempts: Vec<Attempt>,
}

/// One path that was tried.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Attempt {
    /// A path, or a plain name that the dynamic loader searches for.
    pub path: PathBuf,
    /// What the dynamic loader said, or what is wrong with the library.
    pub problem: String,
}

/// What a failure to load comes down to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadErrorKind {
    /// There is no such library anywhere.
    NotInstalled,
    /// The toolkit is there, the driver's `libascend_hal.so` is not.
    DriverMissing,
    /// Another library that it needs was not found.
    DependencyMissing(String),
    /// It lacks required symbols, all named.
    MissingSymbols(Vec<&'static str>),
    /// Only a library that is good for linking was found.
    StubLibrary,
    /// It is there but may not be read.
    Permission,
    /// It is there but the dynamic loader refuses it.
    Refused,
}

impl LoadError {
    /// What to do about it.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self.kind {
            LoadErrorKind::NotInstalled if self.library == DCMI => {
                "install the Ascend driver, which brings it; a container needs the driver of its \
                 host mounted"
            }
            LoadErrorKind::NotInstalled => {
                "install the Ascend toolkit (CANN), or, where it is installed, source its \
                 set_env.sh, for example /usr/local/Ascend/ascend-toolkit/set_env.sh or \
                 /usr/local/Ascend/cann/set_env.sh"
            }
            LoadErrorKind::DriverMissing => {
                "install the Ascend driver, or add /usr/local/Ascend/driver/lib64/driver and \
                 /usr/local/Ascend/driver/lib64/common to LD_LIBRARY_PATH; a container needs the \
                 driver of its host mounted"
            }
            LoadErrorKind::DependencyMissing(_) => {
                "source set_env.sh of the toolkit, which sets LD_LIBRARY_PATH for its libraries"
            }
            LoadErrorKind::MissingSymbols(_) => {
                "the toolkit is too old or incomplete: 8.1.RC1 is the oldest release supported"
            }
            LoadErrorKind::StubLibrary => {
                "remove devlib and stub folders from LD_LIBRARY_PATH and source set_env.sh of the \
                 toolkit"
            }
            LoadErrorKind::Permission => {
                "let this user read the files and folders named; for devices, join the group \
                 HwHiAiUser"
            }
            LoadErrorKind::Refused => {
                "the file is damaged, made for another processor, or does not fit the driver: \
                 compare the versions of toolkit and driver"
            }
        }
    }
}

impl fmt::Display for LoadErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInstalled => f.write_str("it was not found"),
            Self::DriverMissing => f.write_str("the driver's libascend_hal.so was not found"),
            Self::DependencyMissing(library) => {
                write!(f, "it needs {library}, which was not found")
            }
            Self::MissingSymbols(names) => write!(f, "it lacks {}", names.join(", ")),
            Self::StubLibrary => f.write_str("only a stub for linking was found"),
            Self::Permission => f.write_str("access is denied"),
            Self::Refused => f.write_str("the dynamic loader refuses it"),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} cannot be used: {}; tried", self.library, self.kind)?;
        for attempt in &self.attempts {
            // The loader's words begin with the path, unless they are about another file.
            let path = attempt.path.display().to_string();
            let problem = attempt.problem.strip_prefix(&format!("{path}: "));
            write!(f, "\n  {path}: {}", problem.unwrap_or(&attempt.problem))?;
        }
        write!(f, "\nwhat to do: {}", self.advice())
    }
}

impl std::error::Error for LoadError {}

/// The worst thing that happened on the way: a library that is there but unusable says more than
/// the places where there is none.
fn classify(attempts: &[Attempt]) -> LoadErrorKind {
    let any = |words: &str| attempts.iter().any(|attempt| attempt.problem.contains(words));
    if any("libascend_hal.so") {
        return LoadErrorKind::DriverMissing;
    }
    if any("Permission denied") {
        return LoadErrorKind::Permission;
    }
    if any(STUB) {
        return LoadErrorKind::StubLibrary;
    }
    let refused: Vec<_> = attempts.iter().filter(|attempt| !is_absent(attempt)).collect();
    let dependency = refused.iter().find_map(|attempt| {
        let (library, rest) = attempt.problem.split_once(": ")?;
        rest.contains(ABSENT).then(|| library.to_owned())
    });
    match dependency {
        Some(library) => LoadErrorKind::DependencyMissing(library),
        None if refused.is_empty() => LoadErrorKind::NotInstalled,
        None => LoadErrorKind::Refused,
    }
}

/// Comes with the driver, where the others come with the toolkit.
const DCMI: &str = "libdcmi.so";

const ABSENT: &str = "No such file or directory";
const STUB: &str = "a stub library, for linking only";

/// Whether the file itself is missing, and not one that it needs.
fn is_absent(attempt: &Attempt) -> bool {
    let subject = attempt.problem.split_once(": ").map_or("", |(subject, _)| subject);
    attempt.problem.contains(ABSENT) && Path::new(subject) == attempt.path
}

fn open<T: Table>(name: &'static str, path: &Path) -> Result<(T, OpenedLibrary), String> {
    let library = dlopen(path, 0)?;
    let (library, taken) = path_of(library);
    let taken = taken.unwrap_or_else(|| path.to_owned());
    if taken.components().any(|part| part.as_os_str() == "devlib" || part.as_os_str() == "stub") {
        return Err(format!("{} is {STUB}", taken.display()));
    }
    // Held from here on, whatever becomes of this handle.
    drop(dlopen(path, libc::RTLD_NODELETE)?);
    // SAFETY:
    // - each field of the table has the type of the C function of its name; tests/abi compares
    //   them with the headers of the vendor.
    // - the library stays open, so the addresses stay valid without the handle too.
    let table = unsafe { T::from_library(library.into()) }.map_err(|error| words(&error))?;
    Ok((table, OpenedLibrary { name, path: taken }))
}

fn dlopen(path: &Path, flags: c_int) -> Result<Library, String> {
    // SAFETY:
    // - the initialisers of these libraries are made to run when a program loads them.
    // - nothing of them is unloaded while in use, see `open`.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | flags) }
        .map_err(|error| words(&error))
}

/// The dynamic loader's own words.
fn words(error: &libloading::Error) -> String {
    let mut text = String::new();
    let mut source = std::error::Error::source(error);
    if source.is_none() {
        text = error.to_string();
    }
    while let Some(error) = source {
        let separator = if text.is_empty() { "" } else { ": " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{error}");
        source = error.source();
    }
    text
}

/// The beginning of glibc's `struct link_map`, which is public.
#[repr(C)]
struct LinkMap {
    address: usize,
    name: *const c_char,
}

unsafe extern "C" {
    fn dlinfo(handle: *mut c_void, request: c_int, info: *mut c_void) -> c_int;
}

/// The file that a library was loaded from.
fn path_of(library: Library) -> (Library, Option<PathBuf>) {
    let handle = library.into_raw();
    let mut map: *const LinkMap = core::ptr::null();
    // SAFETY:
    // - `handle` is open.
    // - the request writes one pointer, and `map` has room for it.
    let result = unsafe { dlinfo(handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    let path = if result == 0 && !map.is_null() {
        // SAFETY: the loader's record lives as long as the library is open, which it is here.
        let name = unsafe { (*map).name };
        if name.is_null() {
            None
        } else {
            // SAFETY:
            // - the name is a string ended by a zero.
            // - it lives as long as the record and is copied before the library can be closed.
            let name = unsafe { CStr::from_ptr(name) };
            Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
        }
    } else {
        None
    };
    // SAFETY: `handle` came from `into_raw` and is given back once.
    let library = unsafe { Library::from_raw(handle) };
    (library, path.filter(|path| !path.as_os_str().is_empty()))
}

mod sealed {
    #[allow(unnameable_types, reason = "nobody else is to implement the trait")]
    pub trait Sealed {}
}

/// A generated struct of function addresses. Not implemented elsewhere.
pub trait Table: Sized + sealed::Sealed {
    /// File names to try in turn: the first that opens and is complete is taken.
    const NAMES: &'static [&'static str];
    /// File names that may have what the first one lacks.
    const EXTRA: &'static [&'static str];
    /// Folders of this library beside the common ones.
    const FOLDERS: &'static [&'static str];
    /// Every symbol of the table.
    const SYMBOLS: &'static [Symbol];

    /// Looks every symbol up.
    ///
    /// # Safety
    ///
    /// - The functions of `library` have the types that the table gives them.
    /// - The library stays open as long as an address is used.
    ///
    /// # Errors
    ///
    /// None in practice: a missing symbol is an error of its field.
    unsafe fn from_library(library: libloading::Library) -> Result<Self, libloading::Error>;

    /// The symbols that are not there.
    fn lacking(&self) -> Vec<Symbol>;

    /// Takes from `other` what this table lacks.
    fn complete(&mut self, other: &mut Self);
}

macro_rules! table {
    ($table:ident {
        names: $names:expr, extra: $extra:expr, folders: $folders:expr,
        required: [$($required:ident)*],
        optional: [$($optional:ident)*],
    }) => {
        impl sealed::Sealed for $table {}
        impl Table for $table {
            const NAMES: &'static [&'static str] = &$names;
            const EXTRA: &'static [&'static str] = &$extra;
            const FOLDERS: &'static [&'static str] = &$folders;
            const SYMBOLS: &'static [Symbol] = &[
                $(Symbol { name: stringify!($required), required: true },)*
                $(Symbol { name: stringify!($optional), required: false },)*
            ];

            unsafe fn from_library(
                library: libloading::Library,
            ) -> Result<Self, libloading::Error> {
                // SAFETY: the caller's obligations are those of this call.
                unsafe { Self::from_library(library) }
            }

            fn lacking(&self) -> Vec<Symbol> {
                let found =
                    [$(self.$required.is_ok(),)* $(self.$optional.is_ok(),)*];
                let symbols = Self::SYMBOLS.iter().zip(found);
                symbols.filter(|&(_, found)| !found).map(|(symbol, _)| *symbol).collect()
            }

            fn complete(&mut self, other: &mut Self) {
                $(if self.$required.is_err() {
                    core::mem::swap(&mut self.$required, &mut other.$required);
                })*
                $(if self.$optional.is_err() {
                    core::mem::swap(&mut self.$optional, &mut other.$optional);
                })*
            }
        }
    };
}

// Required is what every release since 8.1.RC1 declares, is not announced to go, and has nothing
// that could be called instead.
table!(AclTable {
    names: ["libascendcl.so", "libacl_rt.so"],
    extra: ["libacl_rt.so"],
    folders: [],
    required: [
        aclInit aclFinalize aclGetRecentErrMsg aclrtGetSocName aclrtGetRunMode aclrtGetDeviceCount
        aclrtSetDevice aclrtGetDevice aclrtResetDevice aclrtSynchronizeDevice
        aclrtGetDeviceUtilizationRate aclGetDeviceCapability aclrtCreateContext aclrtDestroyContext
        aclrtSetCurrentContext aclrtGetCurrentContext aclrtCreateStream aclrtCreateStreamWithConfig
        aclrtDestroyStream aclrtDestroyStreamForce aclrtSynchronizeStream
        aclrtSynchronizeStreamWithTimeout aclrtStreamQuery aclrtStreamWaitEvent
        aclrtSetStreamFailureMode aclrtCreateEvent aclrtCreateEventWithFlag
        aclrtCreateEventExWithFlag aclrtDestroyEvent aclrtRecordEvent aclrtResetEvent
        aclrtQueryEventStatus aclrtSynchronizeEvent aclrtEventElapsedTime aclrtMalloc aclrtFree
        aclrtMemset aclrtMemsetAsync aclrtGetMemInfo aclrtMallocHost aclrtFreeHost aclrtMemcpy
        aclrtMemcpyAsync aclrtDeviceCanAccessPeer aclrtDeviceEnablePeerAccess
        aclrtDeviceDisablePeerAccess
    ],
    optional: [
        aclrtGetVersion aclsysGetVersionStr aclsysGetCANNVersion aclrtSynchronizeDeviceWithTimeout
        aclrtQueryDeviceStatus aclrtGetDeviceInfo aclrtGetDevicesTopo aclrtDeviceGetUuid
        aclrtDeviceGetPCIBusId aclrtGetLogicDevIdByUserDevId aclrtGetPhyDevIdByUserDevId
        aclrtGetUserDevIdByPhyDevId aclrtGetPhyDevIdByLogicDevId
        aclrtGetLogicDevIdByPhyDevId aclrtStreamAbort aclrtSynchronizeEventWithTimeout
        aclrtEventGetTimestamp aclrtHostRegister aclrtHostRegisterV2 aclrtHostUnregister
        aclrtHostGetDevicePointer aclrtPointerGetAttributes aclrtDevicePeerAccessStatus
        aclrtMemcpy2d aclrtMemcpy2dAsync
    ],
});

table!(HcclTable {
    names: ["libhccl.so"],
    extra: ["libhcomm.so"],
    folders: [],
    required: [
        HcclGetRootInfo HcclCommInitRootInfo HcclCommInitAll HcclCommDestroy HcclGetRankSize
        HcclGetRankId HcclGetCommName HcclGetCommAsyncError HcclGetErrorString HcclAllReduce
        HcclAllGather HcclReduceScatter HcclBroadcast HcclAlltoAll HcclAlltoAllV HcclSend HcclRecv
        HcclBatchSendRecv HcclBarrier
    ],
    optional: [HcclCommInitRootInfoConfig HcclGetCommConfigCapability],
});

table!(DcmiTable {
    names: [DCMI],
    extra: [],
    folders: ["/usr/local/dcmi", "/usr/local/Ascend/driver/lib64/driver"],
    // Drivers come with the one generation of names, the other, or both.
    required: [],
    optional: [
        dcmi_init dcmi_get_card_list dcmi_get_device_num_in_card dcmi_get_driver_version dcmi_get_device_health dcmi_get_device_errorcode_v2
        dcmi_get_device_pcie_info_v2 dcmi_get_device_hbm_info dcmi_get_device_utilization_rate
        dcmi_get_device_resource_info dcmi_get_topo_info_by_device_id dcmi_get_device_temperature
        dcmi_get_device_power_info dcmi_get_device_logic_id dcmi_get_device_phyid_from_logicid
        dcmi_get_device_logicid_from_phyid dcmi_get_card_id_device_id_from_logicid
        dcmi_get_card_id_device_id_from_phyid
        dcmiv2_init dcmiv2_get_driver_version dcmiv2_get_device_list dcmiv2_get_device_health
        dcmiv2_get_device_hbm_info dcmiv2_get_device_utilization_rate
        dcmiv2_get_device_proc_mem_info dcmiv2_get_dev_id_by_chip_phy_id
        dcmiv2_get_dev_id_from_chip_phyid
    ],
});

// Releases that split the operators into packages have a library per package.
table!(AclnnTable {
    names: ["libopapi.so", "libopapi_nn.so"],
    extra: ["libopapi_nn.so", "libnnopbase.so"],
    folders: [],
    required: [
        aclCreateTensor aclDestroyTensor aclnnMatmulGetWorkspaceSize aclnnMatmul
    ],
    optional: [aclSetAclOpExecutorRepeatable aclDestroyAclOpExecutor],
});

#[cfg(test)]
mod tests {
    use super::*;

    fn places(variables: &[(&str, &str)]) -> Vec<String> {
        let variable = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        };
        let search = Search::from_variables(variable);
        let candidates = search.candidates("libx.so", &["/driver"]);
        candidates.iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn plain_name_comes_first_then_the_toolkit_of_the_environment() {
        let found =
            places(&[("ASCEND_TOOLKIT_HOME", "/t"), ("ASCEND_HOME_PATH", "/h"), ("HOME", "/user")]);
        let expected = [
            "libx.so",
            "/h/lib64/libx.so",
            "/t/lib64/libx.so",
            "/user/Ascend/cann/lib64/libx.so",
            "/user/Ascend/ascend-toolkit/latest/lib64/libx.so",
            "/usr/local/Ascend/cann/lib64/libx.so",
            "/usr/local/Ascend/ascend-toolkit/latest/lib64/libx.so",
            "/opt/Ascend/cann/lib64/libx.so",
            "/driver/libx.so",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn same_folder_is_tried_once_and_empty_variables_count_as_unset() {
        let found = places(&[
            ("ASCEND_HOME_PATH", "/usr/local/Ascend/cann"),
            ("ASCEND_TOOLKIT_HOME", ""),
            ("CLUSTER_HEALTH_ASCEND_LIB_DIR", ""),
        ]);
        assert_eq!(found.iter().filter(|path| path.contains("Ascend/cann/lib64")).count(), 2);
        assert_eq!(found[1], "/usr/local/Ascend/cann/lib64/libx.so");
    }

    #[test]
    fn folder_variable_is_the_only_place() {
        let variables = [("CLUSTER_HEALTH_ASCEND_LIB_DIR", "/sim"), ("ASCEND_HOME_PATH", "/h")];
        assert_eq!(places(&variables), ["/sim/libx.so"]);
    }

    #[test]
    fn stub_folders_are_never_looked_into() {
        for path in places(&[("ASCEND_HOME_PATH", "/h"), ("HOME", "/user")]) {
            assert!(!path.contains("devlib") && !path.contains("stub"), "{path}");
        }
    }

    /// Words of glibc, which a test as root cannot provoke.
    #[test]
    fn refusal_to_read_is_told_from_absence() {
        let attempt = |path: &str, words: &str| Attempt {
            path: path.into(),
            problem: format!("{path}: cannot open shared object file: {words}"),
        };
        let absent = attempt("libascendcl.so", "No such file or directory");
        let denied = attempt("/h/lib64/libascendcl.so", "Permission denied");
        assert_eq!(classify(&[absent.clone(), denied]), LoadErrorKind::Permission);
        assert_eq!(classify(&[absent]), LoadErrorKind::NotInstalled);
    }

    /// A function that nobody listed would never be looked for in the second library.
    #[cfg(not(feature = "bindgen"))]
    #[test]
    fn tables_name_every_generated_field() {
        fn check<T: Table>(text: &str) {
            let mut fields: Vec<_> = text
                .lines()
                .filter_map(|line| line.trim().strip_prefix("pub ")?.split_once(": Result<"))
                .map(|(name, _)| name)
                .collect();
            let mut listed: Vec<_> = T::SYMBOLS.iter().map(|symbol| symbol.name).collect();
            fields.sort_unstable();
            listed.sort_unstable();
            assert!(!fields.is_empty());
            assert_eq!(fields, listed);
        }
        check::<AclTable>(include_str!("acl.rs"));
        check::<HcclTable>(include_str!("hccl.rs"));
        check::<DcmiTable>(include_str!("dcmi.rs"));
        check::<AclnnTable>(include_str!("aclnn.rs"));
    }
}
