#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cluster_health_fuzz::bodies::baseline(data));
