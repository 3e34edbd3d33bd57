//! Identifiers that must not be mixed up.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<u32> for $name {
            fn from(id: u32) -> Self {
                Self(id)
            }
        }
    };
}

id! {
    /// A logical CPU as the kernel numbers it (never a position in a list).
    CpuId
}
id! {
    /// A device by its physical id. On the host backend this is the NUMA memory node; on a
    /// synthetic machine 0…n−1.
    DeviceId
}
id! {
    /// A NUMA node as the kernel numbers it.
    NodeId
}
