//! Chance that can be had again by its seed.

use std::ops::Range;

pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64, of: u64) -> Dice {
        let mut dice = Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (of + 1));
        dice.roll();
        dice
    }

    /// splitmix64
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn of(&mut self, range: Range<u64>) -> u64 {
        range.start + self.roll() % (range.end - range.start)
    }

    pub fn percent(&mut self, percent: u64) -> bool {
        self.of(0..100) < percent
    }
}
