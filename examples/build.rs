//! Compiles the C half of `ascend_overhead`.

fn main() {
    println!("cargo::rerun-if-changed=ascend_overhead.c");
    println!("cargo::rerun-if-changed=../ascend-sys/include");
    // Optimised in every profile: it is what ours is compared with.
    cc::Build::new()
        .file("ascend_overhead.c")
        .include("../ascend-sys/include")
        .opt_level(2)
        .warnings(true)
        .cargo_metadata(false)
        .compile("ascend_overhead");
    let folder = std::env::var("OUT_DIR").unwrap_or_default();
    println!("cargo::rustc-link-arg-examples={folder}/libascend_overhead.a");
}
