//! Commands that travel together, and what must stand around them.

use std::time::Duration;

use redis::{Cmd, RedisError, Value};

use crate::connection::Connection;
use crate::error::Error;

/// The replies to a pipeline, and what is wrong with them if too few replicas acknowledged.
pub(super) type Replies = (Vec<Value>, Option<Error>);

pub(super) struct Pipeline {
    commands: redis::Pipeline,
    /// Each command is preceded by ASKING.
    asking: bool,
    /// So many must acknowledge what was written, if not 0.
    min_replicas: u32,
}

impl Pipeline {
    pub(super) fn new<'a>(
        commands: impl Iterator<Item = &'a Cmd>,
        asking: bool,
        min_replicas: u32,
        replicas_within: Duration,
    ) -> Pipeline {
        let mut pipeline = redis::pipe();
        for command in commands {
            if asking {
                pipeline.cmd("ASKING");
            }
            pipeline.add_command(command.clone());
        }
        if min_replicas > 0 {
            // WAIT takes 0 ms for ever.
            let within = (replicas_within.as_millis() as u64).max(1);
            pipeline.cmd("WAIT").arg(min_replicas).arg(within);
        }
        Pipeline {
            commands: pipeline,
            asking,
            min_replicas,
        }
    }

    /// Whether it ends with a WAIT for replicas.
    pub(super) fn has_wait(&self) -> bool {
        self.min_replicas > 0
    }

    pub(super) async fn query(&self, connection: &mut Connection) -> Result<Replies, RedisError> {
        let mut values = connection.send_all(&self.commands).await?;
        let mut shortfall = None;
        if self.has_wait() {
            let wanted = i64::from(self.min_replicas);
            shortfall = match values.pop() {
                Some(Value::Int(acknowledged)) if acknowledged >= wanted => None,
                Some(Value::Int(acknowledged)) => Some(Error::Refused(format!(
                    "NOREPLICAS {acknowledged} of {wanted} replicas acknowledged"
                ))),
                Some(Value::ServerError(error)) => Some(Error::from(&error)),
                _ => Some(Error::no_answer()),
            };
        }
        if self.asking {
            values = values.into_iter().skip(1).step_by(2).collect();
        }
        Ok((values, shortfall))
    }
}
