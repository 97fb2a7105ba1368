//! The helper.
