//! Errors for model formats that Ferrl does not read, with how to convert them.

use std::io::Read;
use std::path::{Path, PathBuf};

use crate::Error;

/// The error for a weight file, or a directory with nothing but GGUF files; `None` for anything else.
pub fn foreign(path: &Path) -> Option<Error> {
    if path.is_file() {
        return Some(file(path));
    }
    let model = ["config.json", super::peft::CONFIG].iter().any(|name| path.join(name).exists());
    if !path.is_dir() || model {
        return None;
    }
    let mut files: Vec<PathBuf> = std::fs::read_dir(path).ok()?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    files.iter().find(|f| is_gguf(f)).map(|f| gguf(f))
}

fn file(path: &Path) -> Error {
    let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if is_gguf(path) {
        return gguf(path);
    }
    let zip = head(path).starts_with(b"PK\x03\x04");
    if zip || ["bin", "pt", "pth", "ckpt", "pkl"].contains(&extension.as_str()) {
        return Error::model("is pickled weights, which Ferrl does not open: a pickle can run any code")
            .at(path.display())
            .fix(format!(
                "convert it where you trust it: python -c \"from transformers import AutoModelForCausalLM as M; \
                 M.from_pretrained('{0}').save_pretrained('{0}-safetensors')\", and give that directory",
                folder.display()
            ));
    }
    let there =
        if folder.join("config.json").is_file() { format!(": {}", folder.display()) } else { String::new() };
    Error::model("is a file, not a model directory")
        .at(path.display())
        .fix(format!("give the directory that holds config.json and the weights{there}"))
}

fn gguf(path: &Path) -> Error {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    Error::model("is a GGUF file of llama.cpp, mostly of quantized weights; Ferrl trains safetensors")
        .at(path.display())
        .fix(format!(
            "use the Hugging Face directory it was made from, or convert it: python -c \"from transformers import \
             AutoModelForCausalLM as M, AutoTokenizer as T; [C.from_pretrained('{}', \
             gguf_file='{name}').save_pretrained('converted') for C in (M, T)]\"",
            folder.display()
        ))
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) || head(path) == b"GGUF"
}

fn head(path: &Path) -> Vec<u8> {
    let mut head = Vec::new();
    if path.is_file()
        && let Ok(file) = std::fs::File::open(path)
    {
        let _ = file.take(4).read_to_end(&mut head); // an unreadable file is of no known kind
    }
    head
}
