//! What the locks guard: a storage that has seen fences and refuses older ones.

use std::collections::HashMap;
use std::sync::Mutex;

#[derive(Default)]
pub struct Storage {
    newest: Mutex<HashMap<usize, Newest>>,
}

#[derive(Default)]
struct Newest {
    fence: u64,
    writes: u64,
}

impl Storage {
    /// The position of this write in the storage's own order, and whether it was accepted.
    pub fn write(&self, key: usize, fence: u64) -> (u64, bool) {
        let mut keys = self.newest.lock().unwrap();
        let newest = keys.entry(key).or_default();
        newest.writes += 1;
        let accepted = fence >= newest.fence;
        newest.fence = newest.fence.max(fence);
        (newest.writes, accepted)
    }
}
