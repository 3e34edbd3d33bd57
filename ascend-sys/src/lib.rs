//! Raw declarations of the Ascend runtime (ACL) and of its collective library (HCCL).
//!
//! This crate is empty in this version: the bindings, the run-time loader and the tables of
//! status codes come with the Ascend backend. It exists now so that the direction of the
//! dependencies (`ascend-sys` ← `cluster-health-core` ← `cluster-health-matrix`) is fixed from the
//! first release on.
