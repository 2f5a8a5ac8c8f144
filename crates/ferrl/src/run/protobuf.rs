//! Protocol buffers and CRC-32, as far as event files need them.

/// Base-128 number, low bits first.
pub(super) fn varint(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
}

fn key(out: &mut Vec<u8>, field: u32, wire: u32) {
    varint(out, u64::from(field << 3 | wire));
}

/// An integer field.
pub(super) fn int(out: &mut Vec<u8>, field: u32, x: u64) {
    key(out, field, 0);
    varint(out, x);
}

/// A field of 8 bytes.
pub(super) fn double(out: &mut Vec<u8>, field: u32, x: f64) {
    key(out, field, 1);
    out.extend(x.to_le_bytes());
}

/// A field of 4 bytes.
pub(super) fn float(out: &mut Vec<u8>, field: u32, x: f32) {
    key(out, field, 5);
    out.extend(x.to_le_bytes());
}

/// A string, bytes or message field.
pub(super) fn bytes(out: &mut Vec<u8>, field: u32, data: &[u8]) {
    key(out, field, 2);
    varint(out, data.len() as u64);
    out.extend(data);
}

/// The reflected polynomial of CRC-32 (IEEE 802.3, zlib).
pub(super) const IEEE: u32 = 0xedb8_8320;
/// The reflected polynomial of CRC-32C (Castagnoli).
pub(super) const CASTAGNOLI: u32 = 0x82f6_3b78;

/// CRC-32 with the given reflected polynomial.
pub(super) fn crc32<const POLYNOMIAL: u32>(data: &[u8]) -> u32 {
    let table = const {
        let mut table = [0; 256];
        let mut i = 0;
        while i < 256 {
            let (mut c, mut bit) = (i as u32, 0);
            while bit < 8 {
                c = if c & 1 == 1 { c >> 1 ^ POLYNOMIAL } else { c >> 1 };
                bit += 1;
            }
            table[i] = c;
            i += 1;
        }
        table
    };
    !data.iter().fold(!0u32, |c, &b| table[(c as u8 ^ b) as usize] ^ c >> 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_the_published_ones() {
        // The examples of RFC 3720, section B.4, and the check values of both polynomials.
        assert_eq!(crc32::<CASTAGNOLI>(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32::<CASTAGNOLI>(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32::<CASTAGNOLI>(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32::<CASTAGNOLI>(b"123456789"), 0xe306_9283);
        assert_eq!(crc32::<IEEE>(b"123456789"), 0xcbf4_3926);
    }
}
