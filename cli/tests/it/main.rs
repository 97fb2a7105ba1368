//! The command with real servers and processes, a module for each of its subjects.

mod options;
mod process_tree;
mod run;
mod signals;
mod support;
