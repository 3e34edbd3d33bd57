#![no_main]

// The library catches the panics of the reader of workbooks; libFuzzer's hook would end the process
// before that. What the library lets through ends it all the same.
libfuzzer_sys::fuzz_target!(
    init: std::panic::set_hook(Box::new(|_| ())),
    |data: &[u8]| cluster_health_fuzz::bodies::older_xlsx(data)
);
