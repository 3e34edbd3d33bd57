//! Members of this package are its examples; the library target holds the Rust code of the
//! documentation, so that `cargo test` compiles and runs it.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../docs/embedding.md")]
struct Embedding;
