//! One file for each command.

pub mod algorithms;
pub mod bench;
pub mod chat;
pub mod doctor;
pub mod generate;
pub mod init;
pub mod report;
pub mod score;
pub mod steps;
pub mod tokenizer;
pub mod train;
