//! Rate and time over bytes as PNG, on logarithmic axes.

use std::convert::Infallible;
use std::io;

use embedded_graphics::mono_font::ascii::{FONT_6X13, FONT_8X13_BOLD};
use embedded_graphics::mono_font::{MonoFont, MonoTextStyle};
use embedded_graphics::pixelcolor::Rgb888;
use embedded_graphics::prelude::{
    Dimensions as _, DrawTarget, Drawable as _, OriginDimensions, Pixel, Point, Primitive as _,
    RgbColor as _, Size,
};
use embedded_graphics::primitives::{Circle, Line, PrimitiveStyle, Rectangle};
use embedded_graphics::text::{Baseline, Text};

/// One series.
#[derive(Debug, Clone)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Bytes, rate (decimal GB/s) and time (microseconds), by bytes.
    pub points: Vec<(f64, f64, f64)>,
}

const WIDTH: i32 = 1280;
const PANEL: i32 = 420;
const LEFT: i32 = 70;
const RIGHT: i32 = 20;
const GAP: i32 = 46;
const TOP: i32 = 34;
const LEADING: i32 = 17;

pub(super) const BLACK: Rgb888 = Rgb888::new(0, 0, 0);
pub(super) const GRID: Rgb888 = Rgb888::new(222, 222, 222);

/// Eight colours that colour-blind readers can tell apart (Okabe and Ito 2008), the yellow darker.
pub(super) const COLORS: [Rgb888; 8] = [
    Rgb888::new(0, 114, 178),
    Rgb888::new(213, 94, 0),
    Rgb888::new(0, 158, 115),
    Rgb888::new(204, 121, 167),
    Rgb888::new(86, 180, 233),
    Rgb888::new(230, 159, 0),
    Rgb888::new(0, 0, 0),
    Rgb888::new(178, 164, 0),
];

/// More curves would be a picture of nothing.
const MOST_CURVES: usize = 48;

pub(super) struct Canvas {
    size: Size,
    pixels: Vec<u8>,
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Size {
        self.size
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(
        &mut self,
        pixels: I,
    ) -> Result<(), Infallible> {
        for Pixel(point, color) in pixels {
            if self.bounding_box().contains(point)
                && let (Ok(x), Ok(y)) = (usize::try_from(point.x), usize::try_from(point.y))
            {
                let at = 3 * (y * self.size.width as usize + x);
                self.pixels[at..at + 3].copy_from_slice(&[color.r(), color.g(), color.b()]);
            }
        }
        Ok(())
    }
}

impl Canvas {
    /// White.
    pub(super) fn new(width: i32, height: i32) -> io::Result<Self> {
        let side = |length: i32| u32::try_from(length).map_err(io::Error::other);
        let size = Size::new(side(width)?, side(height)?);
        Ok(Self { size, pixels: vec![255; 3 * size.width as usize * size.height as usize] })
    }

    /// PNG bytes.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        let mut encoder = png::Encoder::new(&mut out, self.size.width, self.size.height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder.set_compression(png::Compression::Fast);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.pixels)?;
        writer.finish()?;
        Ok(out)
    }

    pub(super) fn text(&mut self, at: (i32, i32), text: &str, font: &MonoFont<'_>) {
        let ascii: String =
            text.replace('µ', "u").chars().map(|c| if c.is_ascii() { c } else { '-' }).collect();
        let style = MonoTextStyle::new(font, BLACK);
        let Ok(_) =
            Text::with_baseline(&ascii, Point::new(at.0, at.1), style, Baseline::Top).draw(self);
    }

    pub(super) fn line(&mut self, from: Point, to: Point, color: Rgb888, width: u32) {
        let Ok(()) =
            Line::new(from, to).into_styled(PrimitiveStyle::with_stroke(color, width)).draw(self);
    }

    pub(super) fn dot(&mut self, at: Point, color: Rgb888, hollow: bool) {
        let style = if hollow {
            PrimitiveStyle::with_stroke(color, 1)
        } else {
            PrimitiveStyle::with_fill(color)
        };
        let Ok(()) = Circle::with_center(at, 7).into_styled(style).draw(self);
    }
}

/// A logarithmic axis on pixels.
#[derive(Debug, Clone, Copy)]
struct Axis {
    low: f64,
    high: f64,
    from: i32,
    to: i32,
}

impl Axis {
    /// Whole powers of `base` around the values; `None` without any that is above 0.
    fn new(values: impl Iterator<Item = f64>, base: f64, (from, to): (i32, i32)) -> Option<Self> {
        let (low, high) = values
            .filter(|value| value.is_finite() && *value > 0.0)
            .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (value.min(low), value.max(high)));
        if high <= 0.0 {
            return None;
        }
        let low = (low.ln() / base.ln() + 1e-9).floor();
        let high = (high.ln() / base.ln() - 1e-9).ceil().max(low + 1.0);
        Some(Self { low: low * base.ln(), high: high * base.ln(), from, to })
    }

    fn place(&self, value: f64) -> i32 {
        let share = ((value.ln() - self.low) / (self.high - self.low)).clamp(0.0, 1.0);
        let pixels = f64::from(self.to - self.from) * share;
        #[allow(clippy::cast_possible_truncation, reason = "within the picture")]
        let pixels = pixels.round() as i32;
        self.from + pixels
    }

    /// Powers of `base` on the axis, at most `most` of them.
    fn ticks(&self, base: f64, most: usize) -> Vec<f64> {
        let count = (self.high - self.low) / base.ln();
        let mut step = 1.0;
        let limit = u32::try_from(most).map_or(f64::INFINITY, f64::from);
        while count / step > limit {
            step += 1.0;
        }
        let mut ticks = Vec::new();
        let mut exponent = 0.0;
        while exponent <= count + 1e-9 {
            ticks.push((self.low + exponent * base.ln()).exp());
            exponent += step;
        }
        ticks
    }
}

/// `8B`, `64KiB`, `1GiB`.
fn bytes(value: f64) -> String {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates, and sizes are not negative"
    )]
    let whole = value.round() as u64;
    cluster_health_core::ByteSize(whole).to_string()
}

fn power_of_ten(value: f64) -> String {
    if (0.001..1e6).contains(&value) {
        let places =
            usize::from(value < 0.999) + usize::from(value < 0.0999) + usize::from(value < 0.00999);
        format!("{value:.places$}")
    } else {
        format!("{value:.0e}")
    }
}

/// Draws both panels: PNG bytes, the same for the same input.
///
/// # Errors
/// When the PNG encoder fails.
pub fn render(title: &str, curves: &[Curve]) -> io::Result<Vec<u8>> {
    let shown = &curves[..curves.len().min(MOST_CURVES)];
    let legend = i32::try_from(shown.len()).unwrap_or(i32::MAX) + 1;
    let height = TOP + 2 * (PANEL + GAP) + legend * LEADING + 8;
    let mut canvas = Canvas::new(WIDTH, height)?;
    canvas.text((LEFT, 10), title, &FONT_8X13_BOLD);
    panel(&mut canvas, shown, TOP, "GB/s", |point| point.1);
    panel(&mut canvas, shown, TOP + PANEL + GAP, "us", |point| point.2);
    let mut y = TOP + 2 * (PANEL + GAP);
    for (index, curve) in shown.iter().enumerate() {
        let (color, hollow) = look(index);
        canvas.line(Point::new(LEFT, y + 6), Point::new(LEFT + 24, y + 6), color, 2);
        canvas.dot(Point::new(LEFT + 12, y + 6), color, hollow);
        canvas.text((LEFT + 32, y), &curve.name, &FONT_6X13);
        y += LEADING;
    }
    if shown.len() < curves.len() {
        let more = format!("and {} more, which are in the table", curves.len() - shown.len());
        canvas.text((LEFT, y), &more, &FONT_6X13);
    }
    canvas.encode()
}

fn look(index: usize) -> (Rgb888, bool) {
    (COLORS[index % COLORS.len()], (index / COLORS.len()) % 2 == 1)
}

fn panel(
    canvas: &mut Canvas,
    curves: &[Curve],
    top: i32,
    unit: &str,
    value: impl Fn(&(f64, f64, f64)) -> f64,
) {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let across = Axis::new(points().map(|point| point.0), 2.0, (LEFT, WIDTH - RIGHT));
    let up = Axis::new(points().map(&value), 10.0, (top + PANEL, top));
    let (Some(across), Some(up)) = (across, up) else {
        canvas.text((LEFT, top), "nothing was measured", &FONT_6X13);
        return;
    };
    for tick in across.ticks(2.0, 14) {
        let x = across.place(tick);
        canvas.line(Point::new(x, top), Point::new(x, top + PANEL), GRID, 1);
        let label = bytes(tick);
        let width = 6 * i32::try_from(label.len()).unwrap_or(0);
        canvas.text(((x - width / 2).min(WIDTH - width), top + PANEL + 5), &label, &FONT_6X13);
    }
    for tick in up.ticks(10.0, 12) {
        let y = up.place(tick);
        canvas.line(Point::new(LEFT, y), Point::new(WIDTH - RIGHT, y), GRID, 1);
        let label = power_of_ten(tick);
        let width = 6 * i32::try_from(label.len()).unwrap_or(0);
        canvas.text((LEFT - 6 - width, y - 6), &label, &FONT_6X13);
    }
    let frame =
        Rectangle::with_corners(Point::new(LEFT, top), Point::new(WIDTH - RIGHT, top + PANEL));
    let Ok(()) = frame.into_styled(PrimitiveStyle::with_stroke(BLACK, 1)).draw(canvas);
    canvas.text((LEFT + 6, top + 4), unit, &FONT_8X13_BOLD);
    for (index, curve) in curves.iter().enumerate() {
        let (color, hollow) = look(index);
        let places: Vec<Point> = curve
            .points
            .iter()
            .filter(|point| value(point) > 0.0)
            .map(|point| Point::new(across.place(point.0), up.place(value(point))))
            .collect();
        for pair in places.windows(2) {
            canvas.line(pair[0], pair[1], color, 2);
        }
        for place in places {
            canvas.dot(place, color, hollow);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8]) -> (usize, usize, Vec<u8>) {
        let mut reader = png::Decoder::new(io::Cursor::new(bytes)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        (info.width as usize, info.height as usize, pixels)
    }

    #[test]
    fn twice_the_exponent_is_twice_as_far_and_every_curve_has_its_colour() {
        let axis = Axis::new([1.0, 1000.0].into_iter(), 10.0, (0, 300)).unwrap();
        assert_eq!([1.0, 10.0, 100.0, 1000.0].map(|x| axis.place(x)), [0, 100, 200, 300]);
        assert!(Axis::new([0.0, f64::NAN].into_iter(), 10.0, (0, 1)).is_none());
        let curve = |name: &str, rate: f64| Curve {
            name: name.to_owned(),
            points: (3..30).map(|e| (2_f64.powi(e), rate, 2_f64.powi(e) / rate / 1e3)).collect(),
        };
        let picture = render("two", &[curve("a", 10.0), curve("b", 40.0)]).unwrap();
        assert_eq!(picture, render("two", &[curve("a", 10.0), curve("b", 40.0)]).unwrap());
        let (width, height, pixels) = decode(&picture);
        assert_eq!(pixels.len(), 3 * width * height);
        for color in &COLORS[..2] {
            let rgb = [color.r(), color.g(), color.b()];
            // Two panels of more than a thousand pixels' width.
            let count = pixels.as_chunks::<3>().0.iter().filter(|pixel| **pixel == rgb).count();
            assert!(count > 2000, "{count}");
        }
    }

    #[test]
    fn nothing_and_too_much_have_a_picture() {
        decode(&render("none", &[]).unwrap());
        let many: Vec<Curve> = (0..100)
            .map(|index| Curve {
                name: format!("{index} µs ≤"), points: vec![(8.0, 1e-9, 1e12)]
            })
            .collect();
        decode(&render("many", &many).unwrap());
    }
}
