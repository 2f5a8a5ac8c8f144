//! One file for each command.

pub mod algorithms;
pub mod analyze;
pub mod bench;
pub mod chat;
pub mod credit;
pub mod data;
pub mod doctor;
pub mod env;
pub mod eval;
pub mod export;
pub mod generate;
pub mod init;
pub mod launch;
pub mod plan;
pub mod recipe;
pub mod report;
pub mod score;
pub mod search;
pub mod shell;
pub mod steps;
pub mod sync;
pub mod tokenizer;
pub mod train;
pub mod verify;
