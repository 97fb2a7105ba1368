//! Bytes of others as they may be printed.

/// Keys and owners for people: UTF-8 that prints as it is; what does not print, or is no UTF-8,
/// escaped as in Rust (`\n`, `\u{202e}`, `\xff`), and so is the backslash. Whoever chose them cannot
/// move a terminal's cursor or forge a line of a log.
///
/// ```
/// assert_eq!(lockkeeper::printable("straße:7".as_bytes()), "straße:7");
/// assert_eq!(lockkeeper::printable(b"\x1b[2J\xff\n"), "\\u{1b}[2J\\xff\\n");
/// ```
pub fn printable(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for part in chunk.valid().split_inclusive(['"', '\'']) {
            let quote = part
                .chars()
                .last()
                .filter(|last| ['"', '\''].contains(last));
            text.extend(part.trim_end_matches(['"', '\'']).escape_debug());
            text.extend(quote);
        }
        text.extend(chunk.invalid().escape_ascii().map(char::from));
    }
    text
}

/// A sentence of a server, which has escaped what it quotes: only control characters are left out.
pub(crate) fn without_controls(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.trim_end().chars().map(plain).collect()
}
