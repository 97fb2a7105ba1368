//! What every helper promises, as scenarios that are run for every helper.
//!
//! A scenario starts a real server, tells an agent of the helper what to do, makes the trouble that
//! networks and machines make, and looks at what the server was asked and the agent answered. The
//! promises are in clients/CONTRACT.md, what an agent is told in AGENTS.md.

pub mod agent;
pub mod agents;
pub mod message;
pub mod scenarios;
