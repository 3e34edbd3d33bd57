//! Showing results: one module per file format.

pub mod csv;
pub mod first_page;
#[cfg(feature = "png")]
pub mod intervals;
#[cfg(feature = "png")]
pub mod lines;
pub mod markdown;
pub mod npy;
#[cfg(feature = "png")]
pub mod png;
pub(crate) mod predicted;
#[cfg(feature = "xlsx")]
pub mod xlsx;

/// Text whose control characters, but ends of lines and tabs, are escapes of Rust (`\u{1b}`): what files
/// of another machine say goes to terminals, which would obey them.
#[must_use]
pub fn printable(text: String) -> String {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(is_control) {
        return text;
    }
    let mut clean = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_control(c) {
            clean.extend(c.escape_unicode());
        } else {
            clean.push(c);
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::printable;

    #[test]
    fn control_characters_are_told_not_obeyed() {
        // Escape, bell, delete, the one-character form of "escape [", a return that hides a line.
        let text = "a\u{1b}[2J\u{7}b\u{7f}\u{9b}31m\rc".to_owned();
        assert_eq!(printable(text), "a\\u{1b}[2J\\u{7}b\\u{7f}\\u{9b}31m\\u{d}c");
        let plain = "× 0.9 of 1\tGB/s\n";
        assert_eq!(printable(plain.to_owned()), plain);
    }
}
