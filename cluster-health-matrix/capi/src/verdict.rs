//! What result folders say.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use cluster_health_core::Bandwidth;
use cluster_health_matrix::Error;
use cluster_health_matrix::compare::{CompareOptions, compare};
use cluster_health_matrix::report::Report;

use crate::error::{Failure, Status, guard};
use crate::text::{self, cleared_text};

/// Judges a result folder: the JSON object that `cluster-health diagnose --json` prints, with
/// "verdict" and "findings", to be freed with `clh_string_free`. `expect` is the rate that the link
/// should have, such as "58.5GB/s"; NULL is what the plan said.
///
/// # Safety
/// `dir` and `expect` are each NULL or point to a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clh_diagnose(
    dir: *const c_char,
    expect: *const c_char,
    json: Option<&mut MaybeUninit<*mut c_char>>,
) -> Status {
    guard(|| {
        let json = cleared_text("json", json)?;
        // SAFETY:
        // * The caller's promise is the same.
        let dir = unsafe { text::path("dir", dir) }?;
        // SAFETY:
        // * The caller's promise is the same.
        let expect = unsafe { text::optional_text("expect", expect) }?;
        let expect: Option<Bandwidth> =
            expect.map(str::parse).transpose().map_err(|error| Error::named("expect", error))?;
        let report = Report::read_expecting(dir, expect)?;
        if let Some(nothing) = report.nothing_measured() {
            return Err(nothing.into());
        }
        *json = text::json(&report.diagnosis)?;
        Ok(Status::Ok)
    })
}

/// Compares two runs of the same plan, A before B: the JSON object that
/// `cluster-health compare A B --json` prints, to be freed with `clh_string_free`. Differences below
/// the share `min_effect` of the rate do not count; 0 is 0.03. Runs of different plans or machines
/// have the verdict "refused" with the differences, unless `force`.
///
/// # Safety
/// `dir_a` and `dir_b` are each NULL or point to a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clh_compare(
    dir_a: *const c_char,
    dir_b: *const c_char,
    min_effect: f64,
    force: bool,
    json: Option<&mut MaybeUninit<*mut c_char>>,
) -> Status {
    guard(|| {
        let json = cleared_text("json", json)?;
        // SAFETY:
        // * The caller's promise is the same.
        let a = unsafe { text::path("dir_a", dir_a) }?;
        // SAFETY:
        // * The caller's promise is the same.
        let b = unsafe { text::path("dir_b", dir_b) }?;
        let mut options = CompareOptions::default().with_force(force);
        if min_effect.to_bits() != 0.0_f64.to_bits() {
            if !(min_effect > 0.0 && min_effect < 1.0) {
                let message = format!("min_effect: {min_effect} is no share between 0 and 1");
                return Err(Failure::new(Status::Invalid, message));
            }
            options = options.with_min_effect(min_effect);
        }
        let (of_a, of_b) = (Report::read(a)?, Report::read(b)?);
        let names = [a, b].map(|dir| dir.display().to_string());
        *json = text::json(&compare((&*names[0], &of_a), (&*names[1], &of_b), &options))?;
        Ok(Status::Ok)
    })
}
