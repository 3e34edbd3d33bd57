//! CPU sets, verified binding and the census of bindable CPUs.
//!
//! | question | item |
//! |---|---|
//! | which CPUs (kernel lists, masks) | [`CpuSet`] |
//! | which ids did the user list, in which order | [`parse_id_list`] |
//! | run here, provably, until dropped | [`PinGuard`] |
//! | run on any of these CPUs, or wherever you could before | [`MaskGuard`] |
//! | which CPUs can be bound, and why not the others | [`Census`] |

mod census;
mod list;
#[allow(
    unsafe_code,
    reason = "the affinity system calls take raw masks; nix and rustix stop at 1,024 CPUs"
)]
mod pin;
mod set;

pub use census::{Census, CensusSummary, CpuRecord, LeftOut, NotBindable, Selection};
pub use list::parse_id_list;
pub use pin::{BindScope, MaskGuard, PinGuard, current_cpu, set_thread_affinity, thread_affinity};
pub use set::CpuSet;
pub(crate) use set::MAX_ID;
