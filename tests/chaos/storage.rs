//! What the locks guard: a storage that refuses fences below the highest of a holder that was to be alone.

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
    pub fn write(&self, key: usize, fence: u64, limit: u16) -> (u64, bool) {
        let mut keys = self.newest.lock().unwrap();
        let newest = keys.entry(key).or_default();
        newest.writes += 1;
        let accepted = fence >= newest.fence;
        if limit == 1 {
            newest.fence = newest.fence.max(fence);
        }
        (newest.writes, accepted)
    }
}
