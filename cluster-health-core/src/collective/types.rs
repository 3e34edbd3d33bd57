//! Data types and reduce operations of collectives, and how they combine values.

use serde::{Deserialize, Serialize};

/// Type of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DataType {
    /// 8-bit signed.
    Int8,
    /// 16-bit signed.
    Int16,
    /// 32-bit signed.
    Int32,
    /// 64-bit signed.
    Int64,
    /// 8-bit unsigned.
    UInt8,
    /// 16-bit unsigned.
    UInt16,
    /// 32-bit unsigned.
    UInt32,
    /// 64-bit unsigned.
    UInt64,
    /// IEEE half precision.
    Float16,
    /// IEEE single precision.
    Float32,
    /// IEEE double precision.
    Float64,
    /// Brain float.
    BFloat16,
}

impl DataType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::Int8 | Self::UInt8 => 1,
            Self::Int16 | Self::UInt16 | Self::Float16 | Self::BFloat16 => 2,
            Self::Int32 | Self::UInt32 | Self::Float32 => 4,
            Self::Int64 | Self::UInt64 | Self::Float64 => 8,
        }
    }
}

/// How values of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum,
    /// Product; integers wrap.
    Prod,
    /// Largest.
    Max,
    /// Smallest.
    Min,
}

/// A value that can be read from and written to bytes.
trait Element: Copy {
    const SIZE: usize;
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut [u8]);
    fn combine(self, other: Self, op: ReduceOp) -> Self;
}

macro_rules! element {
    ($type:ty, $sum:expr, $prod:expr) => {
        impl Element for $type {
            const SIZE: usize = size_of::<$type>();

            fn read(bytes: &[u8]) -> Self {
                let mut word = [0; size_of::<$type>()];
                word.copy_from_slice(bytes);
                Self::from_ne_bytes(word)
            }

            fn write(self, bytes: &mut [u8]) {
                bytes.copy_from_slice(&self.to_ne_bytes());
            }

            fn combine(self, other: Self, op: ReduceOp) -> Self {
                match op {
                    ReduceOp::Sum => $sum(self, other),
                    ReduceOp::Prod => $prod(self, other),
                    ReduceOp::Max => {
                        if other > self {
                            other
                        } else {
                            self
                        }
                    }
                    ReduceOp::Min => {
                        if other < self {
                            other
                        } else {
                            self
                        }
                    }
                }
            }
        }
    };
}

element!(i8, i8::wrapping_add, i8::wrapping_mul);
element!(i16, i16::wrapping_add, i16::wrapping_mul);
element!(i32, i32::wrapping_add, i32::wrapping_mul);
element!(i64, i64::wrapping_add, i64::wrapping_mul);
element!(u8, u8::wrapping_add, u8::wrapping_mul);
element!(u16, u16::wrapping_add, u16::wrapping_mul);
element!(u32, u32::wrapping_add, u32::wrapping_mul);
element!(u64, u64::wrapping_add, u64::wrapping_mul);
element!(f32, std::ops::Add::add, std::ops::Mul::mul);
element!(f64, std::ops::Add::add, std::ops::Mul::mul);
element!(half::f16, std::ops::Add::add, std::ops::Mul::mul);
element!(half::bf16, std::ops::Add::add, std::ops::Mul::mul);

/// `into[i] = into[i] op from[i]` for elements of `data_type`; a rest that is no whole element
/// stays.
pub(super) fn reduce_into(data_type: DataType, op: ReduceOp, into: &mut [u8], from: &[u8]) {
    fn all<T: Element>(op: ReduceOp, into: &mut [u8], from: &[u8]) {
        for (a, b) in into.chunks_exact_mut(T::SIZE).zip(from.chunks_exact(T::SIZE)) {
            T::read(a).combine(T::read(b), op).write(a);
        }
    }
    match data_type {
        DataType::Int8 => all::<i8>(op, into, from),
        DataType::Int16 => all::<i16>(op, into, from),
        DataType::Int32 => all::<i32>(op, into, from),
        DataType::Int64 => all::<i64>(op, into, from),
        DataType::UInt8 => all::<u8>(op, into, from),
        DataType::UInt16 => all::<u16>(op, into, from),
        DataType::UInt32 => all::<u32>(op, into, from),
        DataType::UInt64 => all::<u64>(op, into, from),
        DataType::Float16 => all::<half::f16>(op, into, from),
        DataType::Float32 => all::<f32>(op, into, from),
        DataType::Float64 => all::<f64>(op, into, from),
        DataType::BFloat16 => all::<half::bf16>(op, into, from),
    }
}
