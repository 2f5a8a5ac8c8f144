//! Messages on standard output and standard error that never end a run.
//!
//! The standard `println!` and `eprintln!` panic when the reader has closed the pipe (`ferrl train ... | head -3`) or the disk is
//! full. In this crate these names are the macros below, which ignore failed writes. Results, whose loss must be an error, go through
//! [`crate::output`].

use std::fmt::Arguments;
use std::io::Write;

/// Text to standard output, which may be closed.
pub fn out(text: Arguments<'_>) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_fmt(text).and_then(|()| stdout.flush());
}

/// Text to standard error, which may be closed.
pub fn err(text: Arguments<'_>) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_fmt(text).and_then(|()| stderr.flush());
}

macro_rules! println {
    () => { $crate::console::out(format_args!("\n")) };
    ($($text:tt)*) => { $crate::console::out(format_args!("{}\n", format_args!($($text)*))) };
}

macro_rules! eprint {
    ($($text:tt)*) => { $crate::console::err(format_args!($($text)*)) };
}

macro_rules! eprintln {
    () => { $crate::console::err(format_args!("\n")) };
    ($($text:tt)*) => { $crate::console::err(format_args!("{}\n", format_args!($($text)*))) };
}
