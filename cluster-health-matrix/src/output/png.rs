//! Heatmap pictures: one PNG per size.
//!
//! A picture holds, from top to bottom, the title, the cells with labelled axes and the borders of
//! NUMA nodes, the colour bar, the legend of cells without a rate, and the summary. The colour bar
//! spans the 2nd to the 98th percentile (at least ±1.5 % of the median), so that single outliers do
//! not flatten everything else; rates beyond take the colour of the end, whose label then reads
//! "≤" or "≥".
//!
//! | cell | looks like |
//! |---|---|
//! | measured | a colour of the bar; the number too, where it fits |
//! | predicted by a sampled sweep | its colour under a hatch of black or white, whichever stands out |
//! | not visited | light grey, hatched |
//! | skipped | darker grey, hatched the other way |
//! | failed | magenta |
//! | implausible | black and white squares |

use std::convert::Infallible;
use std::io;
use std::ops::Range;

use embedded_graphics::mono_font::iso_8859_1::{FONT_6X13, FONT_8X13_BOLD};
use embedded_graphics::mono_font::{MonoFont, MonoTextStyle};
use embedded_graphics::pixelcolor::raw::RawU8;
use embedded_graphics::prelude::{
    DrawTarget, Drawable, OriginDimensions, Pixel, PixelColor, Point, Size,
};
use embedded_graphics::text::{Baseline, Text};

use crate::matrix::{Axis, CellStatus, Slice};
use crate::output::predicted::{Sampled, predicted};
use crate::samples::Sweep;
use crate::stats::{quantile_sorted, settle};

/// The colours from slow to fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Palette {
    /// Dark blue to yellow in equal steps of lightness: readable with any colour vision, in grey
    /// and in print.
    #[default]
    Default,
    /// Red, yellow, green, as the older workbooks have it.
    Classic,
}

impl Palette {
    /// Colours at equal distances from slow to fast, sRGB.
    fn anchors(self) -> &'static [[u8; 3]] {
        match self {
            // OKLCH with lightness 0.26 + 0.66 t, hue 285° − 180° t and chroma 0.16 or what the
            // sRGB gamut allows.
            Self::Default => &[
                [36, 1, 104],
                [2, 45, 137],
                [1, 84, 126],
                [4, 113, 135],
                [4, 143, 144],
                [6, 175, 142],
                [87, 203, 119],
                [172, 221, 99],
                [245, 234, 92],
            ],
            Self::Classic => &[[248, 105, 107], [255, 235, 132], [99, 190, 123]],
        }
    }

    /// Colour of a level below [`LEVELS`].
    fn color(self, level: usize) -> [u8; 3] {
        let anchors = self.anchors();
        let (scaled, span) = (level * (anchors.len() - 1), LEVELS - 1);
        let (left, part) = (scaled / span, scaled % span);
        let right = (left + 1).min(anchors.len() - 1);
        std::array::from_fn(|channel| {
            let (a, b) =
                (usize::from(anchors[left][channel]), usize::from(anchors[right][channel]));
            let mixed = (a * (span - part) + b * part + span / 2) / span;
            u8::try_from(mixed).unwrap_or(u8::MAX)
        })
    }
}

/// How a picture is drawn.
#[derive(Debug, Clone, Default)]
#[allow(clippy::exhaustive_structs, reason = "plain options, meant to be written as a literal")]
pub struct Style {
    /// The colours from slow to fast.
    pub palette: Palette,
    /// A last line below the summary, for example host and date; Latin-1 characters.
    pub note: Option<String>,
}

/// Draws the matrix of one size: PNG bytes, the same for the same input.
///
/// The cells span at most about 1,600 pixels each way. Of more rows or columns, several share a
/// pixel, which shows a failed or implausible cell if there is one, else the slowest cell if it is
/// clearly slower than most of the matrix, else the fastest if it is clearly faster, else their
/// median; the picture says how many cells one pixel stands for. A pixel is hatched when most of its
/// cells were predicted, unless it shows one that was measured and stands out. NUMA borders are left
/// out where nodes change every few pixels.
///
/// # Errors
/// When the PNG encoder fails.
pub fn render(slice: &Slice<'_>, style: &Style) -> io::Result<Vec<u8>> {
    encode(&Picture::draw(slice, style).canvas, style.palette)
}

fn encode(canvas: &Canvas, palette: Palette) -> io::Result<Vec<u8>> {
    let side = |length: usize| u32::try_from(length).map_err(io::Error::other);
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, side(canvas.width)?, side(canvas.height)?);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    let colors = (0..LEVELS).map(|level| palette.color(level)).chain(EXTRA);
    encoder.set_palette(colors.flatten().collect::<Vec<u8>>());
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&canvas.pixels)?;
    writer.finish()?;
    Ok(bytes)
}

/// Colours of the bar; the palette of a PNG has room for 16 others.
const LEVELS: usize = 240;

/// Index of a colour in the PNG's palette.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ink(u8);

impl PixelColor for Ink {
    type Raw = RawU8;
}

const WHITE: Ink = Ink(240);
const BLACK: Ink = Ink(241);
const LIGHT: Ink = Ink(242);
const MIDDLE: Ink = Ink(243);
const DARK: Ink = Ink(244);
const MAGENTA: Ink = Ink(245);
/// The colours after the levels, in the order of the constants above.
const EXTRA: [[u8; 3]; 6] =
    [[255, 255, 255], [0, 0, 0], [232, 232, 232], [176, 176, 176], [112, 112, 112], [214, 0, 147]];

/// Pattern of a cell without a rate, at a pixel of the picture.
fn pattern(status: CellStatus, x: usize, y: usize) -> Ink {
    match status {
        CellStatus::NotVisited | CellStatus::Measured => {
            if (x + y).is_multiple_of(5) {
                MIDDLE
            } else {
                LIGHT
            }
        }
        CellStatus::Skipped => {
            if (x + 4 * y).is_multiple_of(5) {
                DARK
            } else {
                MIDDLE
            }
        }
        CellStatus::Failed => MAGENTA,
        CellStatus::Implausible => {
            if (x / 2 + y / 2).is_multiple_of(2) {
                BLACK
            } else {
                WHITE
            }
        }
    }
}

/// True where the hatch of a predicted cell covers its colour.
fn is_hatched(x: usize, y: usize) -> bool {
    (x + y).is_multiple_of(5)
}

/// Black on light colours, white on dark ones.
fn contrast(palette: Palette, ink: Ink) -> Ink {
    let [r, g, b] = palette.color(usize::from(ink.0)).map(u32::from);
    if 299 * r + 587 * g + 114 * b < 128_000 { WHITE } else { BLACK }
}

/// Which of the states without a rate a cell is in; `None` with a rate.
fn unmeasured(rate: f64, status: CellStatus) -> Option<CellStatus> {
    match status {
        _ if rate.is_finite() => None,
        CellStatus::Measured => Some(CellStatus::NotVisited),
        other => Some(other),
    }
}

/// Drawn pixels, one palette index each.
#[derive(Debug)]
struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Canvas {
    fn new(width: usize, height: usize) -> Self {
        Self { width, height, pixels: vec![WHITE.0; width * height] }
    }

    /// Fills a rectangle, cut off at the edges, with the ink of each pixel.
    fn fill(
        &mut self,
        x: usize,
        y: usize,
        size: (usize, usize),
        ink: impl Fn(usize, usize) -> Ink,
    ) {
        let right = (x + size.0).min(self.width);
        for row in y..(y + size.1).min(self.height) {
            for column in x..right {
                self.pixels[row * self.width + column] = ink(column, row).0;
            }
        }
    }

    /// Writes a line of text with its upper left corner at a point.
    fn text(&mut self, x: usize, y: usize, text: &str, font: &MonoFont<'_>, ink: Ink) {
        let latin = text.replace('≤', "<").replace('≥', ">");
        let coordinate = |value: usize| i32::try_from(value).unwrap_or(i32::MAX);
        let position = Point::new(coordinate(x), coordinate(y));
        let style = MonoTextStyle::new(font, ink);
        match Text::with_baseline(&latin, position, style, Baseline::Top).draw(self) {
            Ok(_) => {}
        }
        // Latin-1 has no signs for "at most" and "at least": underline the angle.
        for (index, _) in text.chars().enumerate().filter(|(_, c)| matches!(c, '≤' | '≥')) {
            self.fill(x + index * GLYPH, y + LINE - 2, (GLYPH - 1, 1), |_, _| ink);
        }
    }

    /// Writes a line of text around a horizontal centre.
    fn centered(&mut self, x: usize, y: usize, text: &str, ink: Ink) {
        self.text(x.saturating_sub(text_width(text) / 2), y, text, &FONT_6X13, ink);
    }
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        let side = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        Size::new(side(self.width), side(self.height))
    }
}

impl DrawTarget for Canvas {
    type Color = Ink;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Ink>>>(
        &mut self,
        pixels: I,
    ) -> Result<(), Infallible> {
        for Pixel(point, ink) in pixels {
            if let (Ok(x), Ok(y)) = (usize::try_from(point.x), usize::try_from(point.y)) {
                self.fill(x, y, (1, 1), |_, _| ink);
            }
        }
        Ok(())
    }
}

/// Width of a character of the normal font.
const GLYPH: usize = 6;
/// Height of a line of the normal font, and distance of two lines.
const LINE: usize = 13;
const LEADING: usize = 16;
/// Width of a character of the title.
const TITLE_GLYPH: usize = 8;
/// Empty border of a picture.
const MARGIN: usize = 12;
/// Least width of a picture: room for the title and the colour bar of tiny matrices.
const LEAST_WIDTH: usize = 640;

fn text_width(text: &str) -> usize {
    text.chars().count() * GLYPH
}

/// Breaks a text between words into lines of at most `limit` characters.
fn wrap(text: &str, limit: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= limit => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Most cells drawn along an axis, aim for the pixels of an axis, and largest cell.
const MOST_CELLS: usize = 1_600;
const AIM: usize = 1_280;
const LARGEST_CELL: usize = 60;
/// Least mean distance of NUMA borders at which they are drawn.
const LEAST_NODE: usize = 6;

/// Where the cells of an axis lie, in pixels from its start.
#[derive(Debug)]
struct Track {
    /// Labels per drawn cell.
    group: usize,
    /// Pixels per drawn cell.
    cell: usize,
    /// First pixel of each drawn cell.
    starts: Vec<usize>,
    /// Pixels of the lines between NUMA nodes.
    borders: Vec<usize>,
    /// The stretches between those lines, with their node where it is known.
    nodes: Vec<(Range<usize>, Option<u32>)>,
    /// Number of pixels.
    length: usize,
}

impl Track {
    fn new(axis: &Axis) -> Self {
        let group = axis.len().div_ceil(MOST_CELLS).max(1);
        let drawn = axis.len().div_ceil(group);
        let cell = (AIM / drawn.max(1)).clamp(1, LARGEST_CELL);
        let mut changes: Vec<usize> = (1..axis.len().min(axis.nodes.len()))
            .filter(|&index| axis.nodes[index] != axis.nodes[index - 1])
            .map(|index| (index + group / 2) / group)
            .collect();
        if changes.len() * LEAST_NODE > drawn * cell {
            changes.clear();
        }
        changes.dedup();
        let mut track = Self {
            group,
            cell,
            starts: Vec::with_capacity(drawn),
            borders: Vec::new(),
            nodes: Vec::new(),
            length: 0,
        };
        let mut changes = changes.into_iter().peekable();
        for index in 0..drawn {
            if index > 0 && changes.next_if_eq(&index).is_some() {
                track.borders.push(track.length);
                track.length += 1;
            }
            track.starts.push(track.length);
            track.length += cell;
        }
        if !track.borders.is_empty() {
            let ends = track.borders.iter().copied().chain([track.length]);
            let mut start = 0;
            for end in ends {
                let middle = track.starts.partition_point(|&first| first <= (start + end) / 2);
                let label = (middle.saturating_sub(1) * group).min(axis.len() - 1);
                track.nodes.push((start..end, axis.nodes[label]));
                start = end + 1;
            }
        }
        track
    }

    /// Middle of the drawn cell that shows the label at `index`.
    fn center(&self, index: usize) -> usize {
        self.starts[index / self.group] + self.cell / 2
    }

    /// Labels to write, with their middles at least `distance` pixels apart: ids that are multiples
    /// of 1, 2, 5, 10 …, else whatever fits.
    fn ticks(&self, ids: &[u32], distance: usize) -> Vec<(usize, u32)> {
        let steps = (0..10).flat_map(|power| [1, 2, 5].map(|step| step * 10_u64.pow(power)));
        for step in steps {
            let ticks: Vec<_> = (0..ids.len())
                .filter(|&index| u64::from(ids[index]).is_multiple_of(step))
                .map(|index| (self.center(index), ids[index]))
                .collect();
            if ticks.len() < ids.len().min(2) {
                break;
            }
            if ticks.windows(2).all(|pair| pair[1].0 - pair[0].0 >= distance) {
                return ticks;
            }
        }
        let mut ticks: Vec<(usize, u32)> = Vec::new();
        for (index, &id) in ids.iter().enumerate() {
            let center = self.center(index);
            if ticks.last().is_none_or(|last| center - last.0 >= distance) {
                ticks.push((center, id));
            }
        }
        ticks
    }
}

/// Decimal places that show `value` to `digits` significant digits.
fn decimals(value: f64, digits: f64) -> usize {
    let places = digits - 1.0 - (value.abs().log10() + 1e-9).floor();
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped to 0…12; NaN becomes 0"
    )]
    let places = places.clamp(0.0, 12.0) as usize;
    places
}

/// A rate with four significant digits.
fn number(rate: f64) -> String {
    let places = if rate > 0.0 { decimals(rate, 4.0) } else { 0 };
    format!("{rate:.places$}")
}

/// The colour bar: rates in decimal GB/s between two round ends.
#[derive(Debug)]
struct Scale {
    low: f64,
    high: f64,
    /// Distance of the labels between the ends.
    step: f64,
    /// Decimal places that write both ends exactly.
    places: usize,
    /// True when there are rates beyond the end.
    below: bool,
    above: bool,
}

impl Scale {
    /// From rates in ascending order, at least as far as ends, median and the places of the cuts;
    /// `None` without any.
    fn new(sorted: &[f64]) -> Option<Self> {
        let last = sorted.len().checked_sub(1)?;
        // From five rates on one is cut off at each end: interpolated percentiles of few rates
        // would follow a single outlier.
        let cut = if last < 4 { 0 } else { last.div_ceil(50) };
        let median = quantile_sorted(sorted, 0.5);
        let margin = if median.abs() > 0.0 { 0.015 * median.abs() } else { 1.0 };
        let low = sorted[cut].min(median - margin);
        let high = sorted[last - cut].max(median + margin);
        let rough = (high - low) / 5.0;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .map(|factor| factor * power)
            .find(|&step| step >= rough)
            .unwrap_or(rough);
        let unit = step / 10.0;
        let (low, high) = ((low / unit).floor() * unit, (high / unit).ceil() * unit);
        let (below, above) = (sorted[0] < low, sorted[last] > high);
        Some(Self { low, high, step, places: decimals(unit, 1.0), below, above })
    }

    /// Position of a rate among `count` equal parts of the bar.
    fn part(&self, rate: f64, count: usize) -> usize {
        #[allow(clippy::cast_precision_loss, reason = "a few hundred parts")]
        let position = (rate - self.low) / (self.high - self.low) * count as f64;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "what is below 0 or NaN becomes 0, what is large saturates"
        )]
        let part = position as usize;
        part.min(count - 1)
    }

    fn level(&self, rate: f64) -> Ink {
        Ink(u8::try_from(self.part(rate, LEVELS)).unwrap_or(u8::MAX))
    }

    /// Labelled rates between the ends.
    fn between(&self) -> impl Iterator<Item = f64> {
        let first = (self.low / self.step).ceil();
        // More than twice as many as the choice of the step allows.
        (0..16_u8)
            .map(move |index| (first + f64::from(index)) * self.step)
            .filter(|&rate| rate > self.low && rate < self.high)
    }
}

/// What a drawn cell shows.
#[derive(Debug, Clone, Copy)]
enum Cell {
    Rate { rate: f64, hatched: bool },
    Without(CellStatus),
}

/// Rates beyond these stand out from a matrix.
#[derive(Debug, Clone, Copy)]
struct Limits {
    slow: f64,
    fast: f64,
}

impl Limits {
    /// Half as far again from the median as the ends of the bar: of noise alone, few of the cells
    /// that share a pixel are there.
    fn new(scale: Option<&Scale>, median: f64) -> Self {
        let beyond = |end: f64| median + 1.5 * (end - median);
        scale.map_or(Self { slow: f64::NAN, fast: f64::NAN }, |scale| Self {
            slow: beyond(scale.low),
            fast: beyond(scale.high),
        })
    }
}

/// What stands for a group of cells: a failed or implausible cell, else the slowest if it stands out,
/// else the fastest if it does, else the (lower) median, else what kept the group from being
/// measured. `rates` is room for the rates of a group, with whether each was measured.
fn most_telling(
    slice: &Slice<'_>,
    rows: Range<usize>,
    columns: &Range<usize>,
    limits: Limits,
    rates: &mut Vec<(f64, bool)>,
) -> Cell {
    let mut worst = CellStatus::NotVisited;
    rates.clear();
    for row in rows {
        for column in columns.clone() {
            let here = slice.gbps[[row, column]];
            match unmeasured(here, slice.status[[row, column]]) {
                None => rates.push((here, true)),
                Some(CellStatus::Failed) => worst = CellStatus::Failed,
                Some(CellStatus::Implausible) if worst != CellStatus::Failed => {
                    worst = CellStatus::Implausible;
                }
                Some(CellStatus::Skipped) if worst == CellStatus::NotVisited => {
                    worst = CellStatus::Skipped;
                }
                Some(_) => {
                    let rate = predicted(slice, row, column).map(|(rate, _)| f64::from(rate));
                    rates.extend(rate.map(|rate| (rate, false)));
                }
            }
        }
    }
    if matches!(worst, CellStatus::Failed | CellStatus::Implausible) {
        return Cell::Without(worst);
    }
    let measured = rates.iter().filter(|(_, is_measured)| *is_measured).count();
    let most_predicted = 2 * measured < rates.len();
    // Of two equal rates the measured one.
    let order = |a: &(f64, bool), b: &(f64, bool)| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1));
    let Some(middle) = rates.len().checked_sub(1).map(|last| last / 2) else {
        return Cell::Without(worst);
    };
    let (below, median, above) = rates.select_nth_unstable_by(middle, order);
    let slowest = below.iter().copied().min_by(order).unwrap_or(*median);
    let fastest = above.iter().copied().max_by(order).unwrap_or(*median);
    let (shown, stands_out) = if slowest.0 < limits.slow {
        (slowest, true)
    } else if fastest.0 > limits.fast {
        (fastest, true)
    } else {
        (*median, false)
    };
    // The colour of a cell that was measured and stands out is never covered.
    Cell::Rate { rate: shown.0, hatched: most_predicted && !(stands_out && shown.1) }
}

/// `cpu` as people write it.
fn shown(axis: &Axis) -> String {
    axis.name.replace("cpu", "CPU")
}

fn title(slice: &Slice<'_>) -> String {
    let bytes = slice.bytes.to_string();
    let digits = bytes.find(|c: char| !c.is_ascii_digit()).unwrap_or(bytes.len());
    let (count, unit) = bytes.split_at(digits);
    let (rows, columns) = (shown(slice.rows), shown(slice.columns));
    let what = match slice.sweep {
        Sweep::H2d => "H2D",
        Sweep::D2h => "D2H",
        Sweep::Bidirectional => "H2D + D2H at once",
        Sweep::CorePair => {
            return format!(
                "all_gather {count} {unit} per rank · {rows} × {columns} · per-rank GB/s"
            );
        }
    };
    format!("{what} {count} {unit} · {rows} × {columns} · decimal GB/s")
}

fn subtitle(slice: &Slice<'_>, rows: &Track, columns: &Track) -> String {
    let mut text = format!("load {}", slice.load);
    if slice.memory.is_pageable() {
        text.push_str(" · pageable host memory");
    }
    let cells = rows.group * columns.group;
    if cells > 1 {
        let unit = if rows.cell * columns.cell == 1 { "pixel" } else { "drawn cell" };
        text.push_str(&format!(
            " · 1 {unit} = {cells} cells ({} × {}): one that stands out, else their median",
            rows.group, columns.group
        ));
    }
    text
}

/// The states without a rate that occur, with how many cells are in each.
fn states(slice: &Slice<'_>, predicted: usize) -> Vec<(CellStatus, String)> {
    [
        (CellStatus::NotVisited, "not visited", predicted),
        (CellStatus::Skipped, "skipped", 0),
        (CellStatus::Failed, "failed", 0),
        (CellStatus::Implausible, "implausible", 0),
    ]
    .into_iter()
    .filter_map(|(status, name, other)| {
        let cells = slice.gbps.iter().zip(&slice.status);
        let count = cells.filter(|(rate, is)| unmeasured(**rate, **is) == Some(status)).count();
        (count > other).then(|| (status, format!("{name} ({})", count - other)))
    })
    .collect()
}

fn summary(slice: &Slice<'_>, sorted: &[f64], predicted: usize) -> String {
    let missing = slice.gbps.len() - sorted.len() - predicted;
    let mut text = format!("{} measured, ", sorted.len());
    if predicted > 0 {
        text.push_str(&format!("{predicted} predicted, "));
    }
    text.push_str(&format!("{missing} not measured"));
    if !sorted.is_empty() {
        let at = |q: f64| number(quantile_sorted(sorted, q));
        text.push_str(&format!(
            "{} · min {} · p10 {} · median {} · p90 {} · max {} GB/s",
            if predicted > 0 { " · of those measured" } else { "" },
            at(0.0),
            at(0.1),
            at(0.5),
            at(0.9),
            at(1.0)
        ));
    }
    text
}

/// A drawn picture and where its parts lie.
#[derive(Debug)]
struct Picture {
    canvas: Canvas,
    /// Upper left corner of the cells.
    origin: (usize, usize),
    rows: Track,
    columns: Track,
    scale: Option<Scale>,
    /// Upper left corner and width of the colour bar.
    bar: (usize, usize, usize),
}

/// What the hatch means, in the legend.
const HATCHED: &str = "hatched = predicted, not measured";

const BAR_HEIGHT: usize = 14;
const TICK: usize = 4;

impl Picture {
    fn draw(slice: &Slice<'_>, style: &Style) -> Self {
        // Sorted as far as anything here looks at it.
        let mut sorted: Vec<f64> = slice.measured().collect();
        let cut = sorted.len().saturating_sub(1).div_ceil(50);
        let ends = [cut, sorted.len().saturating_sub(1 + cut)];
        settle(&mut sorted, &[0.0, 0.1, 0.5, 0.9, 1.0], &ends);
        let scale = Scale::new(&sorted);
        let track = |axis: &Axis| {
            let nothing = Axis::new(axis.name, Vec::new(), Vec::new());
            Track::new(if slice.gbps.is_empty() { &nothing } else { axis })
        };
        let (rows, columns) = (track(slice.rows), track(slice.columns));
        let (row_name, column_name) = (shown(slice.rows), shown(slice.columns));

        let widest = |axis: &Axis| axis.ids.iter().max().map_or(0, |id| id.to_string().len());
        let left = MARGIN + text_width(&row_name).max(widest(slice.rows) * GLYPH) + TICK + 4;
        let side = rows.nodes.iter().filter_map(|node| node.1).map(|node| text_width(&long(node)));
        let right = TICK + 4 + side.max().unwrap_or(2 * GLYPH) + MARGIN;
        let width = (left + columns.length + right).max(LEAST_WIDTH);

        let room = width - 2 * MARGIN;
        let title = wrap(&title(slice), room / TITLE_GLYPH);
        let subtitle = wrap(&subtitle(slice, &rows, &columns), room / GLYPH);
        let sampled = Sampled::of(slice).filter(|sampled| sampled.predicted > 0);
        let predicted_cells = sampled.map_or(0, |sampled| sampled.predicted);
        let mut below = wrap(&summary(slice, &sorted, predicted_cells), room / GLYPH);
        below.extend(style.note.iter().flat_map(|note| wrap(note, room / GLYPH)));
        let states = states(slice, predicted_cells);

        let top = MARGIN + (title.len() + subtitle.len()) * LEADING + LEADING + TICK + 4;
        let axes = top + rows.length.max(LEADING) + TICK + 2 + 2 * LEADING + 4;
        let bar_height = if scale.is_some() { BAR_HEIGHT + TICK + LEADING + 6 } else { 0 };
        let legend = axes + bar_height;
        let hatch = legend + if states.is_empty() { 0 } else { LEADING + 4 };
        let legend_height = hatch - legend + if sampled.is_some() { LEADING + 4 } else { 0 };
        let height = legend + legend_height + below.len() * LEADING + MARGIN;

        let pixels_per_level = if room >= 2 * LEVELS + 100 { 2 } else { 1 };
        let mut picture = Self {
            canvas: Canvas::new(width, height),
            origin: (left, top),
            rows,
            columns,
            scale,
            bar: (MARGIN, axes, pixels_per_level * LEVELS),
        };
        let mut y = MARGIN;
        for line in &title {
            picture.canvas.text(MARGIN, y, line, &FONT_8X13_BOLD, BLACK);
            y += LEADING;
        }
        for line in &subtitle {
            picture.canvas.text(MARGIN, y, line, &FONT_6X13, BLACK);
            y += LEADING;
        }
        picture.draw_axes(slice, &row_name, &column_name);
        picture.draw_cells(slice, style.palette, quantile_sorted(&sorted, 0.5));
        picture.draw_bar();
        let mut x = MARGIN;
        for (status, text) in &states {
            picture.canvas.fill(x, legend, (LINE, LINE), |_, _| DARK);
            picture
                .canvas
                .fill(x + 1, legend + 1, (LINE - 2, LINE - 2), |x, y| pattern(*status, x, y));
            picture.canvas.text(x + LINE + 4, legend, text, &FONT_6X13, BLACK);
            x += LINE + 4 + text_width(text) + 16;
        }
        if let Some(Sampled { measured, predicted, error }) = sampled {
            let ink = Ink(u8::try_from(LEVELS / 2).unwrap_or(u8::MAX));
            let hatch_ink = contrast(style.palette, ink);
            let canvas = &mut picture.canvas;
            canvas.fill(MARGIN, hatch, (LINE, LINE), |_, _| DARK);
            canvas.fill(MARGIN + 1, hatch + 1, (LINE - 2, LINE - 2), |x, y| {
                if is_hatched(x, y) { hatch_ink } else { ink }
            });
            let mut text = format!("{HATCHED} ({predicted} cells; {measured} measured)");
            if error.is_finite() {
                text.push_str(&format!(" · median error ±{:.1} %", 100.0 * error));
            }
            canvas.text(MARGIN + LINE + 4, hatch, &text, &FONT_6X13, BLACK);
        }
        y = legend + legend_height;
        for line in &below {
            picture.canvas.text(MARGIN, y, line, &FONT_6X13, BLACK);
            y += LEADING;
        }
        picture
    }

    /// Frame, ticks, labels, names and NUMA borders.
    fn draw_axes(&mut self, slice: &Slice<'_>, row_name: &str, column_name: &str) {
        let Self { canvas, origin: (left, top), rows, columns, .. } = self;
        let (left, top) = (*left, *top);
        let (right, bottom) = (left + columns.length, top + rows.length);
        if slice.gbps.is_empty() {
            let text = format!(
                "no cells: {} {row_name} × {} {column_name}",
                slice.rows.len(),
                slice.columns.len()
            );
            canvas.text(MARGIN, top, &text, &FONT_6X13, BLACK);
            return;
        }
        let name_x = (left - TICK - 4).saturating_sub(text_width(row_name));
        canvas.text(name_x, top - LEADING - TICK, row_name, &FONT_6X13, BLACK);
        let name_y = bottom + TICK + 2 + LEADING;
        canvas.centered(left + columns.length / 2, name_y, column_name, BLACK);
        canvas.fill(left - 1, top - 1, (columns.length + 2, rows.length + 2), |_, _| BLACK);
        // The cells leave the lines between nodes free; black there would look like slow cells.
        canvas.fill(left, top, (columns.length, rows.length), |_, _| WHITE);

        for (center, id) in rows.ticks(&slice.rows.ids, LINE + 1) {
            let (y, text) = (top + center, id.to_string());
            canvas.fill(left - 1 - TICK, y, (TICK, 1), |_, _| BLACK);
            let x = (left - TICK - 4).saturating_sub(text_width(&text));
            canvas.text(x, y.saturating_sub(LINE / 2), &text, &FONT_6X13, BLACK);
        }
        let widest = slice.columns.ids.iter().max().map_or(0, |id| text_width(&id.to_string()));
        for (center, id) in columns.ticks(&slice.columns.ids, widest + GLYPH) {
            canvas.fill(left + center, bottom + 1, (1, TICK), |_, _| BLACK);
            canvas.centered(left + center, bottom + TICK + 2, &id.to_string(), BLACK);
        }

        for border in &rows.borders {
            canvas.fill(right + 1, top + border, (TICK + 4, 1), |_, _| BLACK);
        }
        for (pixels, node) in &rows.nodes {
            if let Some(node) = node
                && pixels.len() >= LINE
            {
                let y = top + (pixels.start + pixels.end - LINE) / 2;
                canvas.text(right + 1 + TICK + 3, y, &long(*node), &FONT_6X13, BLACK);
            }
        }
        for border in &columns.borders {
            canvas.fill(left + border, top - 1 - TICK - 4, (1, TICK + 4), |_, _| BLACK);
        }
        let fits = |text: &str, pixels: &Range<usize>| text_width(text) + 2 <= pixels.len();
        let known = || columns.nodes.iter().filter_map(|(pixels, node)| Some((pixels, (*node)?)));
        let spelled = known().all(|(pixels, node)| fits(&long(node), pixels));
        for (pixels, node) in known() {
            let text = if spelled { long(node) } else { format!("N{node}") };
            if fits(&text, pixels) {
                let x = left + (pixels.start + pixels.end) / 2;
                canvas.centered(x, top - LEADING - TICK, &text, BLACK);
            }
        }
    }

    fn draw_cells(&mut self, slice: &Slice<'_>, palette: Palette, median: f64) {
        let Self { canvas, origin: (left, top), rows, columns, scale, .. } = self;
        let level = |rate: f64| scale.as_ref().map_or(WHITE, |scale| scale.level(rate));
        let limits = Limits::new(scale.as_ref(), median);
        let mut room = Vec::new();
        let size = (columns.cell, rows.cell);
        let longest = slice.measured().map(|rate| text_width(&number(rate)));
        // Only where a number could fit: formatting every rate of a large matrix costs more than
        // drawing it.
        let numbers = size.0 >= 4 * GLYPH
            && size.1 > LINE
            && longest.max().is_some_and(|longest| longest + 2 <= size.0);
        let members = |track: &Track, index: usize, count: usize| {
            index * track.group..((index + 1) * track.group).min(count)
        };
        for (row, &start) in rows.starts.iter().enumerate() {
            let y = *top + start;
            for (column, &start) in columns.starts.iter().enumerate() {
                let x = *left + start;
                let cell = most_telling(
                    slice,
                    members(rows, row, slice.rows.len()),
                    &members(columns, column, slice.columns.len()),
                    limits,
                    &mut room,
                );
                match cell {
                    Cell::Without(status) => canvas.fill(x, y, size, |x, y| pattern(status, x, y)),
                    Cell::Rate { rate, hatched } => {
                        let ink = level(rate);
                        let on_it = contrast(palette, ink);
                        if hatched {
                            let ink = |x, y| if is_hatched(x, y) { on_it } else { ink };
                            canvas.fill(x, y, size, ink);
                        } else {
                            canvas.fill(x, y, size, |_, _| ink);
                        }
                        if numbers {
                            let text = number(rate);
                            let (x, y) = (x + size.0 / 2, y + (size.1 - LINE) / 2);
                            if hatched {
                                let width = text_width(&text) + 2;
                                canvas.fill(x - width / 2, y, (width, LINE), |_, _| ink);
                            }
                            canvas.centered(x, y, &text, on_it);
                        }
                    }
                }
            }
        }
    }

    fn draw_bar(&mut self) {
        let Some(scale) = &self.scale else { return };
        let (x, y, width) = self.bar;
        let canvas = &mut self.canvas;
        canvas.fill(x - 1, y - 1, (width + 2, BAR_HEIGHT + 2), |_, _| BLACK);
        canvas.fill(x, y, (width, BAR_HEIGHT), |column, _| {
            Ink(u8::try_from((column - x) * LEVELS / width).unwrap_or(u8::MAX))
        });
        canvas.text(x + width + 8, y, "decimal GB/s", &FONT_6X13, BLACK);
        let mut tick = |rate: f64| {
            let at = x + scale.part(rate, width);
            canvas.fill(at, y + BAR_HEIGHT, (1, TICK), |_, _| BLACK);
            at
        };
        let (places, label_y) = (scale.places, y + BAR_HEIGHT + TICK + 1);
        let sign = |beyond: bool, sign: &'static str| if beyond { sign } else { "" };
        let low = format!("{}{:.places$}", sign(scale.below, "≤ "), scale.low);
        let high = format!("{}{:.places$}", sign(scale.above, "≥ "), scale.high);
        let (first, last) = (tick(scale.low), tick(scale.high));
        let between: Vec<(usize, f64)> = scale.between().map(|rate| (tick(rate), rate)).collect();
        canvas.text(first, label_y, &low, &FONT_6X13, BLACK);
        let last_start = (last + 1).saturating_sub(text_width(&high));
        canvas.text(last_start, label_y, &high, &FONT_6X13, BLACK);
        let mut free = first + text_width(&low) + GLYPH;
        for (at, rate) in between {
            let text = format!("{rate:.places$}");
            let start = at.saturating_sub(text_width(&text) / 2);
            if start >= free && start + text_width(&text) + GLYPH <= last_start {
                canvas.text(start, label_y, &text, &FONT_6X13, BLACK);
                free = start + text_width(&text) + GLYPH;
            }
        }
    }
}

/// Label of a NUMA node.
fn long(node: u32) -> String {
    format!("node {node}")
}

#[cfg(test)]
mod tests {
    use cluster_health_core::ByteSize;

    use super::*;
    use crate::matrix::Matrix;

    type Rgb = [u8; 3];

    /// Pixels of a PNG.
    struct Decoded {
        width: usize,
        height: usize,
        pixels: Vec<Rgb>,
    }

    impl Decoded {
        fn at(&self, x: usize, y: usize) -> Rgb {
            self.pixels[y * self.width + x]
        }
    }

    fn decode(bytes: &[u8]) -> Decoded {
        let mut decoder = png::Decoder::new(io::Cursor::new(bytes));
        decoder.set_transformations(png::Transformations::EXPAND);
        let mut reader = decoder.read_info().unwrap();
        let mut data = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut data).unwrap();
        assert_eq!(info.color_type, png::ColorType::Rgb);
        let pixels = data[..info.buffer_size()].as_chunks().0.to_vec();
        let (width, height) = (info.width as usize, info.height as usize);
        assert_eq!(pixels.len(), width * height);
        Decoded { width, height, pixels }
    }

    fn axis(name: &'static str, count: usize, per_node: Option<usize>) -> Axis {
        let id = |index: usize| u32::try_from(index).unwrap();
        let nodes = (0..count).map(|index| per_node.map(|per| id(index / per))).collect();
        Axis::new(name, (0..count).map(id).collect(), nodes)
    }

    fn matrix(
        rows: usize,
        columns: usize,
        per_node: Option<usize>,
        rate: impl Fn(usize, usize) -> f64,
    ) -> Matrix {
        let (rows, columns) = (axis("cpu", rows, per_node), axis("device", columns, None));
        let mut matrix = Matrix::new(Sweep::H2d, "idle", vec![ByteSize::mib(16)], rows, columns);
        for ((_, row, column), cell) in matrix.gbps.indexed_iter_mut() {
            *cell = rate(row, column);
            if cell.is_finite() {
                matrix.status[[0, row, column]] = CellStatus::Measured;
            }
        }
        matrix
    }

    /// A rate that varies by ±1 % without a visible order.
    fn healthy(row: usize, column: usize) -> f64 {
        let hash = (row * 7919 + column * 104_729 + row * column * 31) % 2003;
        58.5 * (0.99 + 0.02 * f64::from(u32::try_from(hash).unwrap()) / 2003.0)
    }

    /// The picture as decoded, and where its parts lie.
    fn drawn(matrix: &Matrix) -> (Decoded, Picture) {
        let picture = Picture::draw(&matrix.slice(0), &Style::default());
        (decode(&encode(&picture.canvas, Palette::Default).unwrap()), picture)
    }

    impl Picture {
        /// A pixel of the drawn cell, clear of its number.
        fn corner(&self, row: usize, column: usize) -> (usize, usize) {
            (self.origin.0 + self.columns.starts[column], self.origin.1 + self.rows.starts[row])
        }
    }

    fn distance(a: Rgb, b: Rgb) -> u32 {
        a.iter().zip(b).map(|(a, b)| u32::from(a.abs_diff(b))).sum()
    }

    #[test]
    fn a_cell_has_the_colour_of_the_bar_at_its_rate() {
        let rate = |row: usize, column: usize| {
            40.0 + f64::from(u32::try_from(row * 8 + column).unwrap()) * 0.25
        };
        let matrix = matrix(8, 8, None, rate);
        let (image, picture) = drawn(&matrix);
        let scale = picture.scale.as_ref().unwrap();
        let (x, y, width) = picture.bar;
        for row in 0..8 {
            for column in 0..8 {
                // The bar reads linearly from its low to its high end.
                let part = (rate(row, column) - scale.low) / (scale.high - scale.low);
                #[allow(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    clippy::cast_precision_loss,
                    reason = "a pixel of the bar"
                )]
                let at = x + (part.clamp(0.0, 1.0) * (width - 1) as f64).round() as usize;
                let (cell_x, cell_y) = picture.corner(row, column);
                let (cell, bar) = (image.at(cell_x, cell_y), image.at(at, y));
                // One pixel of rounding is at most one level.
                assert!(distance(cell, bar) <= 8, "{row} {column}: {cell:?} {bar:?}");
            }
        }
        let ends = (image.at(x, y), image.at(x + width - 1, y));
        assert_eq!(ends, ([36, 1, 104], [245, 234, 92]));
    }

    #[test]
    fn bar_labels_are_round_and_in_order() {
        let even = (0..998).map(|index| 55.0 + f64::from(index) * 0.00432);
        let rates: Vec<f64> = [50.0].into_iter().chain(even).chain([70.0]).collect();
        let scale = Scale::new(&rates).unwrap();
        for end in [scale.low, scale.high] {
            let places = scale.places;
            let written: f64 = format!("{end:.places$}").parse().unwrap();
            assert!((written - end).abs() < 1e-9, "{end} is written {written}");
        }
        // 2nd and 98th percentile of the evenly spaced rates.
        assert!((scale.low - 55.086).abs() < 0.1 && scale.low <= 55.09, "{}", scale.low);
        assert!((scale.high - 59.23).abs() < 0.1 && scale.high >= 59.22, "{}", scale.high);
        assert!(scale.below && scale.above);
        assert_eq!(scale.between().count(), 4, "{:?}", scale.between().collect::<Vec<_>>());
    }

    #[test]
    fn a_constant_matrix_keeps_a_span_around_its_median() {
        let scale = Scale::new(&[60.0; 9]).unwrap();
        assert!(scale.low <= 59.1 && scale.high >= 60.9 && scale.high < 62.0);
        assert!(!scale.below && !scale.above);
    }

    #[test]
    fn an_outlier_does_not_change_other_colours() {
        for (rows, columns) in [(640, 16), (3, 3)] {
            let without = matrix(rows, columns, None, healthy);
            let (before, picture) = drawn(&without);
            for outlier in [0.5, 500.0] {
                let mut with = without.clone();
                with.gbps[[0, 1, 1]] = outlier;
                let (after, _) = drawn(&with);
                for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |c| (row, c))) {
                    let (x, y) = picture.corner(row, column);
                    let change = distance(before.at(x, y), after.at(x, y));
                    if (row, column) == (1, 1) {
                        let end: Rgb = if outlier < 1.0 { [36, 1, 104] } else { [245, 234, 92] };
                        assert_eq!(after.at(x, y), end);
                    } else {
                        assert!(change < 60, "{rows}: {row} {column} changes by {change}");
                    }
                }
            }
        }
    }

    #[test]
    fn cells_without_a_rate_differ_from_every_rate_and_from_each_other() {
        let states = [
            CellStatus::NotVisited,
            CellStatus::Skipped,
            CellStatus::Failed,
            CellStatus::Implausible,
        ];
        for palette in [Palette::Default, Palette::Classic] {
            let colors: Vec<Rgb> = (0..LEVELS).map(|level| palette.color(level)).collect();
            let mut seen: Vec<Vec<Rgb>> = Vec::new();
            let mut matrix = matrix(5, 2, None, healthy);
            for (row, status) in states.into_iter().enumerate() {
                matrix.gbps[[0, row, 0]] = f64::NAN;
                matrix.status[[0, row, 0]] = status;
            }
            let style = Style { palette, note: None };
            let image = decode(&render(&matrix.slice(0), &style).unwrap());
            let picture = Picture::draw(&matrix.slice(0), &style);
            for (row, status) in states.into_iter().enumerate() {
                let (x, y) = picture.corner(row, 0);
                let mut cell: Vec<Rgb> = (0..picture.rows.cell)
                    .flat_map(|dy| (0..picture.columns.cell).map(move |dx| (dx, dy)))
                    .map(|(dx, dy)| image.at(x + dx, y + dy))
                    .collect();
                cell.sort_unstable();
                cell.dedup();
                for color in &cell {
                    let nearest = colors.iter().map(|other| distance(*color, *other)).min();
                    assert!(nearest > Some(60), "{palette:?} {status:?} {color:?}: {nearest:?}");
                }
                assert!(!seen.contains(&cell), "{status:?} looks like another state");
                seen.push(cell);
            }
        }
    }

    #[test]
    fn the_default_palette_grows_lighter_and_palettes_differ() {
        let luma = |color: Rgb| {
            let [r, g, b] = color.map(u32::from);
            2126 * r + 7152 * g + 722 * b
        };
        let colors: Vec<u32> =
            (0..LEVELS).map(|level| luma(Palette::Default.color(level))).collect();
        assert!(colors.windows(8).all(|pair| pair[0] < pair[7]), "{colors:?}");
        let matrix = matrix(3, 3, None, healthy);
        let classic = Style { palette: Palette::Classic, note: None };
        assert_ne!(
            render(&matrix.slice(0), &Style::default()).unwrap(),
            render(&matrix.slice(0), &classic).unwrap()
        );
        assert_eq!(Palette::Classic.color(LEVELS - 1), [99, 190, 123]);
    }

    #[test]
    fn the_same_matrix_gives_the_same_bytes() {
        let matrix = matrix(64, 16, Some(32), healthy);
        let style = Style { note: Some("node a".to_owned()), ..Style::default() };
        let first = render(&matrix.slice(0), &style).unwrap();
        assert_eq!(first, render(&matrix.slice(0), &style).unwrap());
        assert_ne!(first, render(&matrix.slice(0), &Style::default()).unwrap());
    }

    #[test]
    fn numa_nodes_are_parted_by_a_line() {
        let (image, picture) = drawn(&matrix(640, 16, Some(80), healthy));
        assert_eq!(picture.rows.borders.len(), 7);
        let (left, top) = picture.origin;
        for (node, border) in picture.rows.borders.iter().enumerate() {
            let last = (node + 1) * 80 - 1;
            assert_eq!(picture.rows.starts[last] + picture.rows.cell, *border);
            assert_eq!(picture.rows.starts[last + 1], border + 1);
            assert!(
                (left..left + picture.columns.length)
                    .all(|x| image.at(x, top + border) == [255; 3])
            );
        }
        let nodes: Vec<_> = picture.rows.nodes.iter().map(|(_, node)| node.unwrap()).collect();
        assert_eq!(nodes, [0, 1, 2, 3, 4, 5, 6, 7]);
        for per_node in [None, Some(640), Some(1)] {
            let (_, picture) = drawn(&matrix(640, 16, per_node, healthy));
            assert!(picture.rows.borders.is_empty(), "{per_node:?}");
        }
    }

    #[test]
    fn ticks_carry_ids_and_keep_their_distance() {
        let mut ids: Vec<u32> = (0..20).chain(320..340).collect();
        ids.push(1007);
        let track = Track::new(&Axis::new("cpu", ids.clone(), Vec::new()));
        for distance in [10, 35, 100, 5000] {
            let ticks = track.ticks(&ids, distance);
            assert!(!ticks.is_empty());
            assert!(ticks.windows(2).all(|pair| pair[1].0 - pair[0].0 >= distance));
            for (center, id) in ticks {
                let index = ids.iter().position(|other| *other == id).unwrap();
                assert_eq!(center, index * track.cell + track.cell / 2);
            }
        }
        let track = Track::new(&axis("cpu", 640, None));
        let labels: Vec<u32> =
            track.ticks(&axis("cpu", 640, None).ids, 14).into_iter().map(|tick| tick.1).collect();
        assert_eq!(labels[..3], [0, 10, 20]);
        assert_eq!(labels.len(), 64);
        let odd = [7, 13, 19];
        let track = Track::new(&Axis::new("cpu", odd.to_vec(), Vec::new()));
        assert_eq!(track.ticks(&odd, 14).len(), 3);
    }

    #[test]
    fn slow_cells_survive_down_sampling() {
        let rate = |row: usize, column: usize| match (row, column) {
            (1000, _) | (_, 1601) | (1345, 77) => 20.0,
            _ => healthy(row, column),
        };
        let mut matrix = matrix(1700, 1650, None, rate);
        matrix.gbps[[0, 1699, 1649]] = f64::NAN;
        matrix.status[[0, 1699, 1649]] = CellStatus::Failed;
        matrix.gbps[[0, 1500, 3]] = f64::NAN;
        matrix.status[[0, 1500, 3]] = CellStatus::NotVisited;
        let (image, picture) = drawn(&matrix);
        assert_eq!((picture.rows.group, picture.columns.group), (2, 2));
        assert!(image.width <= 1800 && image.height <= 1800);
        let pixel = |row: usize, column: usize| {
            let (x, y) = picture.corner(row / 2, column / 2);
            image.at(x, y)
        };
        let slowest = [36, 1, 104];
        assert!((0..1650).all(|column| pixel(1000, column) == slowest));
        assert!((0..1699).all(|row| pixel(row, 1601) == slowest));
        assert_eq!(pixel(1345, 77), slowest);
        assert_eq!(pixel(1699, 1649), EXTRA[5]);
        // A neighbour's rate stands for a cell that was not visited.
        assert!(![EXTRA[2], EXTRA[3]].contains(&pixel(1500, 3)));
        let others = (0..1700).step_by(2).filter(|row| *row != 1000 && *row != 1344);
        let slow = others.filter(|&row| pixel(row, 77) == slowest).count();
        assert_eq!(slow, 0);
    }

    /// A row and a column slower by a tenth and a cell by a fifth, in noise of 1 % (of normal shape,
    /// as the sum of four even draws).
    #[test]
    fn single_slow_rows_columns_and_cells_of_a_large_map_are_seen() {
        const SIDE: usize = 4096;
        let mut state = 1_u64;
        let mut noise = move || {
            // A finaliser of splitmix64.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let bytes = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB).to_be_bytes();
            let sum: u32 = bytes[..4].iter().map(|byte| u32::from(*byte)).sum();
            (f64::from(sum) - 510.0) / 255.0 * 3.0_f64.sqrt() * 0.01
        };
        let (rows, columns) = (axis("rank-0 cpu", 4096, None), axis("rank-1 cpu", 4096, None));
        let sizes = vec![ByteSize::mib(8)];
        let mut matrix = Matrix::new(Sweep::CorePair, "idle", sizes, rows, columns);
        for ((_, row, column), rate) in matrix.gbps.indexed_iter_mut() {
            let factor = match (row, column) {
                (3333, 77) => 0.8,
                (1000, _) | (_, 2001) => 0.9,
                _ => 1.0,
            };
            *rate = 40.0 * factor * (1.0 + noise());
        }
        matrix.status.fill(CellStatus::Measured);
        let (image, picture) = drawn(&matrix);
        assert_eq!((picture.rows.group, picture.columns.group), (3, 3));
        let pixel = |row: usize, column: usize| {
            let (x, y) = picture.corner(row / 3, column / 3);
            image.at(x, y)
        };
        let pixels = SIDE.div_ceil(3);
        let rows =
            (0..pixels).filter(|at| distance(pixel(1000, at * 3), pixel(1010, at * 3)) > 120);
        assert!(rows.count() > pixels * 95 / 100);
        let columns =
            (0..pixels).filter(|at| distance(pixel(at * 3, 2001), pixel(at * 3, 2010)) > 120);
        assert!(columns.count() > pixels * 95 / 100);
        let around: Vec<(usize, usize)> = (3330 - 30..3330 + 30)
            .step_by(3)
            .flat_map(|row| (77 - 60..77 + 60).step_by(3).map(move |column| (row, column)))
            .filter(|(row, column)| (row / 3, column / 3) != (1111, 25))
            .collect();
        let apart = around
            .iter()
            .filter(|(row, column)| distance(pixel(3333, 77), pixel(*row, *column)) > 120);
        assert!(apart.count() > around.len() * 95 / 100);
    }

    #[test]
    fn a_slow_cell_wins_against_a_faster_one_farther_from_the_median() {
        let mut matrix = matrix(3300, 2, None, healthy);
        matrix.gbps[[0, 0, 0]] = 40.0;
        matrix.gbps[[0, 1, 0]] = 500.0;
        matrix.gbps[[0, 4, 0]] = 500.0;
        let (image, picture) = drawn(&matrix);
        assert_eq!(picture.rows.group, 3);
        let at = |row: usize| {
            let (x, y) = picture.corner(row, 0);
            image.at(x, y)
        };
        assert_eq!((at(0), at(1)), ([36, 1, 104], [245, 234, 92]));
    }

    /// Pixels of a rectangle of drawn cells that are black or white.
    fn hatched(
        image: &Decoded,
        picture: &Picture,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> f64 {
        let (left, top) = picture.corner(rows.start, columns.start);
        let (right, bottom) = picture.corner(rows.end - 1, columns.end - 1);
        let (right, bottom) = (right + picture.columns.cell, bottom + picture.rows.cell);
        let pixels = (top..bottom).flat_map(|y| (left..right).map(move |x| (x, y)));
        let (mut all, mut found) = (0.0, 0.0);
        for (x, y) in pixels {
            all += 1.0;
            found += f64::from(u8::from([[0; 3], [255; 3]].contains(&image.at(x, y))));
        }
        found / all
    }

    /// Cells of 60 pixels, of 2, of 1, and several in a drawn one: the left half measured.
    #[test]
    fn predicted_cells_are_hatched_at_every_scale() {
        for (side, width) in [(8_u32, 8_u32), (640, 640), (700, 700), (3300, 60)] {
            let mut matrix = crate::output::predicted::tests::sampled(side, width, 1);
            let half = usize::try_from(width).unwrap() / 2;
            let prediction = matrix.predicted.as_mut().unwrap();
            for ((size, row, column), rate) in matrix.gbps.indexed_iter_mut() {
                if column >= half {
                    let at = [size, row, column];
                    prediction.gbps[at] = 40.5;
                    prediction.error[at] = 0.03;
                    *rate = f64::NAN;
                    matrix.status[at] = CellStatus::NotVisited;
                }
            }
            let (image, picture) = drawn(&matrix);
            let (rows, columns) = (picture.rows.starts.len(), picture.columns.starts.len());
            let middle = columns / 2;
            let left = hatched(&image, &picture, 0..rows, 0..middle);
            let right = hatched(&image, &picture, 0..rows, middle + 1..columns);
            if side > 8 {
                assert!(left < 1e-9, "{side}: {left}");
                assert!((right - 0.2).abs() < 0.02, "{side}: {right}");
            } else {
                // The numbers in the cells are black or white, too.
                assert!(left < 0.1 && right > 0.15, "{side}: {left} {right}");
            }
            // A rate that was measured among predicted ones stays to be seen, and a slow one is never
            // covered by the hatch.
            let (row, column) = (half, half + half / 2);
            matrix.gbps[[0, row, column]] = 20.0;
            matrix.status[[0, row, column]] = CellStatus::Measured;
            let (image, picture) = drawn(&matrix);
            let (x, y) = picture.corner(row / picture.rows.group, column / picture.columns.group);
            assert_eq!(image.at(x, y), [36, 1, 104], "{side}");
        }
    }

    #[test]
    fn several_cells_on_a_pixel_are_hatched_by_majority() {
        // Of 3 cells one above the other 2 or 1 are predicted, none, 3 in eight of nine columns.
        for (stride, share) in [(2, 0.1), (1, 0.0), (9, 0.178)] {
            let matrix = crate::output::predicted::tests::sampled(3303, 99, stride);
            let (image, picture) = drawn(&matrix);
            assert_eq!((picture.rows.group, picture.columns.group), (3, 1));
            let rows = picture.rows.starts.len();
            let found = hatched(&image, &picture, 0..rows, 0..99);
            assert!((found - share).abs() < 0.02, "{stride}: {found}");
        }
    }

    #[test]
    fn the_legend_tells_what_a_hatch_means() {
        let matrix = crate::output::predicted::tests::sampled(12, 12, 4);
        let mut without = matrix.clone();
        without.predicted = None;
        let heights = [&matrix, &without].map(|matrix| drawn(matrix).0.height);
        // A line for the hatch instead of one for cells that were not visited.
        assert_eq!(heights[0], heights[1]);
        let sorted: Vec<f64> = vec![1.0; 36];
        assert!(
            summary(&matrix.slice(0), &sorted, 108).starts_with(
                "36 measured, 108 predicted, 0 not measured · of those measured · min"
            )
        );
        assert!(states(&matrix.slice(0), 108).is_empty());
        assert_eq!(states(&matrix.slice(0), 0)[0].1, "not visited (108)");
        assert_eq!(HATCHED, "hatched = predicted, not measured");
    }

    #[test]
    fn degenerate_matrices_have_a_picture() {
        let nan = |_: usize, _: usize| f64::NAN;
        for (rows, columns) in [(0, 0), (0, 16), (16, 0), (1, 1), (2, 1), (1, 2000)] {
            for rate in [nan, healthy, |_, _| 0.0, |_, _| 58.5, |_, _| f64::INFINITY, |_, _| -1.0] {
                let (image, _) = drawn(&matrix(rows, columns, Some(1), rate));
                assert!(image.width >= 400 && image.height >= 80);
                assert!(image.pixels.contains(&[0; 3]), "{rows} × {columns} shows nothing");
            }
        }
        let (_, picture) = drawn(&matrix(3, 3, None, nan));
        assert!(picture.scale.is_none());
    }

    #[test]
    fn extreme_rates_do_not_fail() {
        for value in [f64::MAX, f64::MIN_POSITIVE, f64::MIN, 1e-300] {
            let (image, _) =
                drawn(&matrix(4, 4, None, |row, _| if row == 0 { value } else { 1.0 }));
            assert!(image.width < 2000);
        }
    }

    #[test]
    fn long_texts_do_not_widen_the_picture() {
        let matrix = matrix(2, 1, None, healthy);
        let note = "a very long note ".repeat(200) + &"x".repeat(5000);
        let style = Style { note: Some(note), ..Style::default() };
        let image = decode(&render(&matrix.slice(0), &style).unwrap());
        assert_eq!(image.width, LEAST_WIDTH);
    }

    #[test]
    fn titles_say_what_was_measured() {
        let mut h2d = matrix(2, 1, None, healthy);
        assert_eq!(title(&h2d.slice(0)), "H2D 16 MiB · CPU × device · decimal GB/s");
        h2d.memory = crate::matrix::Memory::Pageable;
        let picture = drawn(&h2d).1;
        assert_eq!(
            subtitle(&h2d.slice(0), &picture.rows, &picture.columns),
            "load idle · pageable host memory"
        );
        let (rows, columns) = (axis("rank-0 cpu", 2, None), axis("rank-1 cpu", 2, None));
        let pair = Matrix::new(Sweep::CorePair, "idle", vec![ByteSize::mib(8)], rows, columns);
        assert_eq!(
            title(&pair.slice(0)),
            "all_gather 8 MiB per rank · rank-0 CPU × rank-1 CPU · per-rank GB/s"
        );
    }

    #[test]
    fn summaries_count_only_measured_cells() {
        // Type 7 by hand: p10 of 1…11 is the second, p90 the tenth.
        let matrix = matrix(4, 3, None, |row, column| {
            let index = f64::from(u32::try_from(row * 3 + column).unwrap());
            if index < 11.0 { index + 1.0 } else { f64::NAN }
        });
        let sorted: Vec<f64> = (1..=11).map(f64::from).collect();
        assert_eq!(
            summary(&matrix.slice(0), &sorted, 0),
            "11 measured, 1 not measured · min 1.000 · p10 2.000 · median 6.000 · p90 10.00 \
             · max 11.00 GB/s"
        );
    }

    /// Pictures to look at: `cargo test … -- --ignored --nocapture sample_pictures`.
    #[test]
    #[ignore = "writes pictures for the eye"]
    fn sample_pictures() {
        let folder = tempfile::tempdir().unwrap().keep();
        let write = |name: &str, matrix: &Matrix, style: &Style| {
            let start = std::time::Instant::now();
            let bytes = render(&matrix.slice(0), style).unwrap();
            println!("{name}: {} bytes, {:?}", bytes.len(), start.elapsed());
            std::fs::write(folder.join(name).with_extension("png"), bytes).unwrap();
        };
        let style = Style::default();
        let classic = Style { palette: Palette::Classic, note: Some("host a · 2026".to_owned()) };
        let mut h2d = matrix(640, 16, Some(80), |row, column| match (row, column) {
            (_, 3) => healthy(row, column) * 0.9,
            (100, _) => healthy(row, column) * 0.7,
            (400, 12) => 1.0,
            _ => healthy(row, column),
        });
        write("h2d-640x16", &h2d, &style);
        write("h2d-640x16-classic", &h2d, &classic);
        let states = [CellStatus::NotVisited, CellStatus::Skipped, CellStatus::Failed];
        for (index, status) in states.into_iter().enumerate() {
            for row in index * 40 + 90..index * 40 + 120 {
                for column in 5..9 {
                    h2d.gbps[[0, row, column]] = f64::NAN;
                    h2d.status[[0, row, column]] = status;
                }
            }
        }
        h2d.gbps[[0, 300, 3]] = f64::NAN;
        h2d.status[[0, 300, 3]] = CellStatus::Implausible;
        write("h2d-640x16-holes", &h2d, &style);
        write("transposed-16x640", &matrix(16, 640, None, healthy), &style);
        write("2x1", &matrix(2, 1, None, healthy), &style);
        let mut small = matrix(8, 8, Some(4), healthy);
        small.gbps[[0, 2, 2]] = f64::NAN;
        small.gbps[[0, 3, 3]] = 0.000_661;
        small.gbps[[0, 4, 4]] = f64::NAN;
        small.status[[0, 4, 4]] = CellStatus::Failed;
        small.gbps[[0, 5, 4]] = f64::NAN;
        small.status[[0, 5, 4]] = CellStatus::Implausible;
        small.gbps[[0, 6, 4]] = f64::NAN;
        small.status[[0, 6, 4]] = CellStatus::Skipped;
        write("8x8-states", &small, &style);
        write("all-nan", &matrix(40, 8, None, |_, _| f64::NAN), &style);
        write("empty", &matrix(0, 16, None, healthy), &style);
        let pair_axes = (axis("rank-0 cpu", 640, Some(80)), axis("rank-1 cpu", 640, Some(80)));
        let bytes = vec![ByteSize::mib(8)];
        let mut pair =
            Matrix::new(Sweep::CorePair, "cpu:2", bytes.clone(), pair_axes.0, pair_axes.1);
        for ((_, row, column), rate) in pair.gbps.indexed_iter_mut() {
            let factor = match (row, column) {
                _ if row == column => 0.61,
                _ if row / 2 == column / 2 => 0.93,
                (_, 480..560) => 1.04,
                (228, _) => 0.97,
                _ => 1.0,
            };
            *rate = healthy(row, column) / 58.5 * 13.7 * factor;
        }
        pair.status.fill(CellStatus::Measured);
        write("pair-640x640", &pair, &style);
        write("pair-640x640-classic", &pair, &classic);
        let tiny = (axis("rank-0 cpu", 3, Some(1)), axis("rank-1 cpu", 3, Some(1)));
        let mut tiny = Matrix::new(Sweep::CorePair, "idle", bytes, tiny.0, tiny.1);
        tiny.gbps.fill(0.0125);
        write("pair-3x3", &tiny, &style);
        let mut large = matrix(3300, 1800, Some(500), |row, column| match (row, column) {
            (1000, _) | (_, 1701) | (2345, 77) => 20.0,
            _ => healthy(row, column),
        });
        large.gbps[[0, 3000, 1000]] = f64::NAN;
        large.status[[0, 3000, 1000]] = CellStatus::Failed;
        write("3300x1800", &large, &style);
        println!("pictures in {}", folder.display());
    }
}
