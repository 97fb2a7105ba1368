//! What keys and owners may be given as.

use std::borrow::Cow;
use std::rc::Rc;
use std::sync::Arc;

/// Text or bytes: what names a lock or an owner.
///
/// | | |
/// |---|---|
/// | text | `&str`, `String`, `&String`, `Box<str>`, `Arc<str>`, `Rc<str>`, `Cow<str>` |
/// | bytes | `&[u8]`, `Vec<u8>`, `[u8; N]`, `&[u8; N]`, `Box<[u8]>`, `Arc<[u8]>`, `Rc<[u8]>`, `Cow<[u8]>` |
///
/// and references to all of these. A type of your own that names a lock may implement it:
///
/// ```no_run
/// use lockkeeper::{Acquired, Error, Lockkeeper, ToBytes};
///
/// struct BookId(u32);
///
/// impl ToBytes for BookId {
///     fn to_bytes(&self) -> Vec<u8> {
///         format!("book:{}", self.0).into_bytes()
///     }
/// }
///
/// # async fn lend(lockkeeper: &Lockkeeper) -> Result<(), Error> {
/// if let Acquired::Yes(held) = lockkeeper.acquire(BookId(7)).await? {
///     println!("book 7 is ours until we say otherwise: {held:?}");
/// }
/// # Ok(())
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither text nor bytes",
    note = "a key is a `&str`, a `String`, a `&[u8]`, a `Vec<u8>` or the like: see `lockkeeper::ToBytes`"
)]
pub trait ToBytes {
    /// The bytes as they are sent.
    fn to_bytes(&self) -> Vec<u8>;
}

impl ToBytes for [u8] {
    fn to_bytes(&self) -> Vec<u8> {
        self.to_vec()
    }
}

impl<const N: usize> ToBytes for [u8; N] {
    fn to_bytes(&self) -> Vec<u8> {
        self.to_vec()
    }
}

impl ToBytes for str {
    fn to_bytes(&self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
}

impl ToBytes for String {
    fn to_bytes(&self) -> Vec<u8> {
        self.as_str().to_bytes()
    }
}

impl ToBytes for Vec<u8> {
    fn to_bytes(&self) -> Vec<u8> {
        self.clone()
    }
}

/// What points to bytes gives the bytes that it points to.
macro_rules! pointers {
    ($($pointer:ty),+) => {$(
        impl<T: ToBytes + ?Sized> ToBytes for $pointer {
            fn to_bytes(&self) -> Vec<u8> {
                (**self).to_bytes()
            }
        }
    )+};
}

pointers!(&T, &mut T, Box<T>, Arc<T>, Rc<T>);

impl<T: ToBytes + ToOwned + ?Sized> ToBytes for Cow<'_, T> {
    fn to_bytes(&self) -> Vec<u8> {
        (**self).to_bytes()
    }
}
