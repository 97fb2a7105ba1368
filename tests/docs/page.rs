//! The pages of the documentation, and the blocks of code in them.

use std::fs;
use std::path::{Path, PathBuf};

/// One Markdown file.
pub struct Page {
    /// From the root of the repository.
    pub path: String,
    pub text: String,
}

/// A fenced block: what stands between three backquotes and three more.
pub struct Block {
    /// The first word behind the backquotes.
    pub language: String,
    /// The words after it.
    pub words: Vec<String>,
    pub text: String,
    /// A comment `<!-- before … -->` above it: code that a reader needs not see, to be run first.
    pub before: String,
    /// The same after it: what must be true then.
    pub after: String,
    /// Where it begins, for messages.
    pub place: String,
}

impl Page {
    pub fn read(path: &str) -> Page {
        let full = testkit::root().join(path);
        let text = fs::read_to_string(&full).unwrap_or_else(|why| panic!("{path}: {why}"));
        Page {
            path: path.to_owned(),
            text,
        }
    }

    /// Every page that a reader finds: those at the root, those in docs/, and the crate's own.
    pub fn all() -> Vec<Page> {
        let mut paths = Vec::new();
        for (folder, deep) in [
            ("", false),
            ("docs", true),
            ("clients/rust", false),
            ("cli", false),
        ] {
            markdown_below(&testkit::root().join(folder), deep, &mut paths);
        }
        paths.sort();
        let from_root = |path: PathBuf| {
            let path = path.strip_prefix(testkit::root()).unwrap();
            Page::read(path.to_str().unwrap())
        };
        paths.into_iter().map(from_root).collect()
    }

    pub fn folder(&self) -> PathBuf {
        let path = testkit::root().join(&self.path);
        path.parent().expect("a file is in a folder").to_owned()
    }

    pub fn blocks(&self) -> Vec<Block> {
        let lines: Vec<&str> = self.text.lines().collect();
        let mut blocks = Vec::new();
        let mut line = 0;
        while line < lines.len() {
            let Some(info) = lines[line].strip_prefix("```") else {
                line += 1;
                continue;
            };
            let length = lines[line + 1..]
                .iter()
                .position(|line| *line == "```")
                .unwrap_or_else(|| panic!("{}:{}: a block without an end", self.path, line + 1));
            let mut words = info.split(' ').map(str::to_owned);
            let (start, end) = (line, line + 1 + length);
            blocks.push(Block {
                language: words.next().unwrap_or_default(),
                words: words.collect(),
                text: lines[start + 1..end].join("\n"),
                before: comment("before", lines[..start].iter().rev().copied(), true),
                after: comment("after", lines[end + 1..].iter().copied(), false),
                place: format!("{}:{}", self.path, start + 1),
            });
            line = end + 1;
        }
        blocks
    }

    /// The blocks of one language.
    pub fn blocks_of(&self, language: &str) -> Vec<String> {
        let blocks = self.blocks().into_iter();
        let these = blocks.filter(|block| block.language == language);
        these.map(|block| block.text).collect()
    }

    /// The text outside of blocks and comments.
    pub fn prose(&self) -> String {
        let mut inside = false;
        let lines = self.text.lines().filter(|line| {
            let edge = line.starts_with("```");
            inside ^= edge;
            !inside && !edge
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

impl Block {
    /// `# worker.py`, `-- guarded.lua`: a first line that names the file this is to be saved as.
    pub fn file_name(&self) -> Option<&str> {
        let first = self.text.lines().next()?;
        let name = ["# ", "-- ", "// "]
            .iter()
            .find_map(|comment| first.strip_prefix(comment))?;
        let name = name.split([' ', ',', ':']).next()?;
        let (stem, extension) = name.rsplit_once('.')?;
        let is_name = |text: &str| {
            !text.is_empty()
                && text
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
        };
        (is_name(stem) && is_name(extension)).then_some(name)
    }
}

fn markdown_below(folder: &Path, deep: bool, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && deep {
            markdown_below(&path, deep, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The comment `<!-- name` nearest to a block, read towards or away from it; nothing but an empty
/// line may be between them.
fn comment<'a>(name: &str, lines: impl Iterator<Item = &'a str>, upwards: bool) -> String {
    let mut lines = lines.skip_while(|line| line.is_empty());
    let (first, last) = (format!("<!-- {name}"), "-->".to_owned());
    let (begin, end) = if upwards {
        (last, first)
    } else {
        (first, last)
    };
    if lines.next() != Some(begin.as_str()) {
        return String::new();
    }
    let mut found: Vec<&str> = lines.take_while(|line| *line != end).collect();
    if upwards {
        found.reverse();
    }
    found.join("\n")
}
