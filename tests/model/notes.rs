//! The notes that a thread makes of its calls, and the watchdog's reading of them.

use loom::sync::Arc;

use super::{check, sound, weak};

/// Names are parts of one text, so that a wrong length is wrong and not out of bounds.
const TEXT: &str = "aclInit aclrtMalloc";
const NAMES: [(usize, usize); 2] = [(0, 7), (8, 19)];

fn name(call: u64) -> &'static str {
    let (start, end) = NAMES[usize::try_from(call).unwrap()];
    &TEXT[start..end]
}

/// A thread makes two calls, one after or inside the other; a watchdog that looks meanwhile never sees
/// the number of one with name or bound of the other.
macro_rules! model {
    ($variant:ident, $inside:expr) => {
        || {
            use $variant::atomic;
            use $variant::note::{Note, device_of};

            let note = Arc::new(Note {
                name: atomic::AtomicPtr::new(std::ptr::null_mut()),
                bound_ms: atomic::AtomicU64::new(0),
                call: atomic::AtomicU64::new(0),
            });
            let watched = Arc::clone(&note);
            let thread = loom::thread::spawn(move || {
                watched.set(1, Some(1), name(0), 10);
                if !$inside {
                    watched.clear();
                }
                watched.set(2, None, name(1), 20);
            });
            let call = note.call();
            if call != 0
                && let Some((found, bound_ms)) = note.details(call)
            {
                let number = call >> 32;
                assert_eq!((found, bound_ms), (name(number - 1), 10 * number), "mixed up");
                assert_eq!(device_of(call).is_some(), number == 1, "mixed up");
            }
            thread.join().unwrap();
        }
    };
}

#[test]
fn a_note_is_read_whole_or_not_at_all() {
    check(None, model!(sound, false));
}

#[test]
fn a_note_inside_another_is_read_whole_or_not_at_all() {
    check(None, model!(sound, true));
}

#[test]
#[should_panic(expected = "mixed up")]
fn notes_of_relaxed_stores_are_found_to_mix() {
    check(None, model!(weak, false));
}
