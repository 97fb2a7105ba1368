//! A plot as SVG: lines over two logarithmic axes, which is all that is needed here.

use std::fmt::Write;

pub struct Plot {
    pub title: String,
    pub x: &'static str,
    pub y: &'static str,
    /// Name and points of each line.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 260.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 50.0;
const COLOURS: [&str; 12] = [
    "#1b6ca8", "#d1495b", "#3c8d53", "#b8860b", "#7d4e9e", "#2a9d8f", "#6b705c", "#e07a5f",
    "#000000", "#9b2226", "#5fa8d3", "#8ac926",
];

/// One axis: where a value lies between `from` and `to`.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Axis {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = (low * 0.9, high * 1.1);
        Axis {
            low,
            high,
            from,
            to,
        }
    }

    fn place(&self, value: f64) -> f64 {
        let share = (value / self.low).ln() / (self.high / self.low).ln();
        self.from + share * (self.to - self.from)
    }

    /// 1, 2 and 5 times the powers of ten that lie on the axis; only the powers if those are many.
    fn ticks(&self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        let steps: &[f64] = if decades > 2.5 {
            &[1.0]
        } else {
            &[1.0, 2.0, 5.0]
        };
        (-9..10)
            .flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)))
            .filter(|tick| (self.low..=self.high).contains(tick))
            .collect()
    }
}

impl Plot {
    pub fn svg(&self) -> String {
        let points = self.lines.iter().flat_map(|(_, points)| points);
        let x = Axis::over(points.clone().map(|point| point.0), LEFT, WIDTH - RIGHT);
        let y = Axis::over(points.map(|point| point.1), HEIGHT - BOTTOM, TOP);
        let mut svg = format!(
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' \
             font-family='sans-serif' font-size='12'>\n\
             <rect width='100%' height='100%' fill='white'/>\n\
             <text x='{LEFT}' y='22' font-size='15'>{}</text>\n",
            self.title
        );
        let mut add = |line: String| writeln!(svg, "{line}").unwrap();
        for tick in x.ticks() {
            let (at, bottom) = (x.place(tick), HEIGHT - BOTTOM);
            add(format!("<path d='M{at:.1} {TOP}V{bottom}' stroke='#ddd'/>"));
            let below = bottom + 16.0;
            add(format!(
                "<text x='{at:.1}' y='{below}' text-anchor='middle'>{tick}</text>"
            ));
        }
        for tick in y.ticks() {
            let (at, right) = (y.place(tick), WIDTH - RIGHT);
            add(format!("<path d='M{LEFT} {at:.1}H{right}' stroke='#ddd'/>"));
            let (left, below) = (LEFT - 6.0, at + 4.0);
            add(format!(
                "<text x='{left}' y='{below:.1}' text-anchor='end'>{tick}</text>"
            ));
        }
        let (middle, below) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 12.0);
        add(format!(
            "<text x='{middle}' y='{below}' text-anchor='middle'>{}</text>",
            self.x
        ));
        let middle = (TOP + HEIGHT - BOTTOM) / 2.0;
        add(format!(
            "<text transform='translate(16 {middle}) rotate(-90)' text-anchor='middle'>{}</text>",
            self.y
        ));
        for (number, (name, points)) in self.lines.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let path: Vec<String> = points
                .iter()
                .map(|(px, py)| format!("{:.1} {:.1}", x.place(*px), y.place(*py)))
                .collect();
            let path = path.join("L");
            add(format!(
                "<path d='M{path}' fill='none' stroke='{colour}' stroke-width='2'/>"
            ));
            for (px, py) in points {
                let (cx, cy) = (x.place(*px), y.place(*py));
                add(format!(
                    "<circle cx='{cx:.1}' cy='{cy:.1}' r='3' fill='{colour}'/>"
                ));
            }
            let (left, at) = (WIDTH - RIGHT + 14.0, TOP + 12.0 + 18.0 * number as f64);
            add(format!(
                "<text x='{left}' y='{at}' fill='{colour}'>{name}</text>"
            ));
        }
        svg + "</svg>\n"
    }
}
