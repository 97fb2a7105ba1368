//! The module.
