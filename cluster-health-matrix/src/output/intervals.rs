//! Ratios with their intervals as PNG, one row each, about a line at 1.

use std::io;

use embedded_graphics::mono_font::ascii::{FONT_6X13, FONT_8X13_BOLD};
use embedded_graphics::prelude::Point;

use super::lines::{BLACK, COLORS, Canvas, GRID};

/// One row.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Interval {
    /// What it is about.
    pub name: String,
    /// The estimate.
    pub ratio: f64,
    /// Ends of its interval; `None` where nothing is known of it.
    pub ends: Option<(f64, f64)>,
    /// True where it is claimed to differ from 1: drawn in colour.
    pub claimed: bool,
}

impl Interval {
    /// A row.
    #[must_use]
    pub fn new(name: String, ratio: f64, ends: Option<(f64, f64)>, claimed: bool) -> Self {
        Self { name, ratio, ends, claimed }
    }
}

const LEADING: i32 = 17;
const TOP: i32 = 40;
const PLOT: i32 = 640;
const GAP: i32 = 16;
/// Characters of a row's name, and of its numbers on the right.
const LONGEST_NAME: usize = 64;
const NUMBERS: i32 = 170;
/// More rows would be a picture of nothing.
const MOST_ROWS: usize = 400;
/// What lies outside is drawn at the edge.
const WIDEST: (f64, f64) = (0.0, 4.0);

/// Draws the rows: PNG bytes, the same for the same input.
///
/// # Errors
/// When the PNG encoder fails.
pub fn render(title: &str, rows: &[Interval]) -> io::Result<Vec<u8>> {
    let shown = &rows[..rows.len().min(MOST_ROWS)];
    let longest = shown.iter().map(|row| row.name.len()).max().unwrap_or(0).min(LONGEST_NAME);
    let left = 6 * i32::try_from(longest).unwrap_or(0) + 2 * GAP;
    let count = i32::try_from(shown.len()).unwrap_or(i32::MAX);
    let bottom = TOP + count * LEADING;
    let mut canvas = Canvas::new(left + PLOT + GAP + NUMBERS, bottom + 4 * LEADING)?;
    canvas.text((GAP, 10), title, &FONT_8X13_BOLD);
    let values = || {
        shown
            .iter()
            .flat_map(|row| [Some(row.ratio), row.ends.map(|e| e.0), row.ends.map(|e| e.1)])
            .flatten()
    };
    let low = values().fold(0.95, f64::min).max(WIDEST.0);
    let high = values().fold(1.05, f64::max).min(WIDEST.1);
    let place = |value: f64| {
        let share = ((value - low) / (high - low)).clamp(0.0, 1.0);
        #[allow(clippy::cast_possible_truncation, reason = "within the picture")]
        let pixels = (f64::from(PLOT) * share).round() as i32;
        left + pixels
    };
    for tick in ticks(low, high) {
        let x = place(tick);
        let color = if (tick - 1.0).abs() < 1e-9 { BLACK } else { GRID };
        canvas.line(Point::new(x, TOP - 4), Point::new(x, bottom), color, 1);
        canvas.text((x - 12, bottom + 4), &format!("{tick:.2}"), &FONT_6X13);
    }
    let mut y = TOP;
    for row in shown {
        let name: String = row.name.chars().take(LONGEST_NAME).collect();
        canvas.text((GAP, y), &name, &FONT_6X13);
        let color = match (row.claimed, row.ratio < 1.0) {
            (false, _) => BLACK,
            (true, true) => COLORS[1],
            (true, false) => COLORS[2],
        };
        let middle = y + 6;
        let mut numbers = format!("{:.3}", row.ratio);
        if let Some((from, to)) = row.ends {
            canvas.line(Point::new(place(from), middle), Point::new(place(to), middle), color, 2);
            numbers += &format!(" ({from:.3} to {to:.3})");
        }
        canvas.dot(Point::new(place(row.ratio), middle), color, !row.claimed);
        canvas.text((left + PLOT + GAP, y), &numbers, &FONT_6X13);
        y += LEADING;
    }
    if shown.is_empty() {
        canvas.text((GAP, bottom + 4), "there is no ratio", &FONT_6X13);
    }
    if shown.len() < rows.len() {
        let more = format!("and {} more, which are in the table", rows.len() - shown.len());
        canvas.text((GAP, bottom + 2 * LEADING), &more, &FONT_6X13);
    }
    canvas.encode()
}

/// Round values, 1 among them.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
        .into_iter()
        .find(|step| (high - low) / step <= 14.0)
        .unwrap_or(2.0);
    let mut ticks = Vec::new();
    let mut tick = 1.0;
    while tick >= low {
        ticks.push(tick);
        tick -= step;
    }
    let mut tick = 1.0 + step;
    while tick <= high {
        ticks.push(tick);
        tick += step;
    }
    ticks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_claimed_has_its_colour_and_nothing_else() {
        use embedded_graphics::prelude::RgbColor as _;
        let row = |ratio, claimed| {
            Interval::new("h2d 16MiB numa:0".to_owned(), ratio, Some((ratio * 0.9, ratio)), claimed)
        };
        let count = |rows: &[Interval], color: usize| {
            let bytes = render("ratios", rows).unwrap();
            assert_eq!(bytes, render("ratios", rows).unwrap());
            let mut reader = png::Decoder::new(io::Cursor::new(bytes)).read_info().unwrap();
            let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
            reader.next_frame(&mut pixels).unwrap();
            let wanted = COLORS[color];
            let rgb = [wanted.r(), wanted.g(), wanted.b()];
            pixels.as_chunks::<3>().0.iter().filter(|pixel| **pixel == rgb).count()
        };
        assert!(count(&[row(0.5, true)], 1) > 30);
        assert_eq!(count(&[row(0.5, true)], 2), 0);
        assert!(count(&[row(1.5, true)], 2) > 30);
        assert_eq!(count(&[row(0.5, false)], 1), 0);
        // Nothing, far too much, far outside.
        render("none", &[]).unwrap();
        render("many", &vec![row(f64::INFINITY, false); 1000]).unwrap();
    }
}
