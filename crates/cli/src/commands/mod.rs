//! One file for each command.

pub mod bench;
pub mod chat;
pub mod doctor;
pub mod generate;
pub mod init;
pub mod score;
pub mod tokenizer;
