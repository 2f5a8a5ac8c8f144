use super::*;
use crate::buffer::DType;

fn on_each<T: Send>(size: usize, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    each_of(threads(size), work)
}

fn each_of<T: Send>(all: Vec<Ranks>, work: impl Fn(Ranks) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = all.into_iter().map(|r| scope.spawn(move || work(r))).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

#[test]
fn bytes_arrive_in_the_order_of_ranks() {
    for size in 1..=4 {
        let all = on_each(size, |ranks| {
            let own = vec![ranks.rank() as u8; ranks.rank() + 1];
            let gathered = ranks.all_gather(&own).unwrap();
            let parts: Vec<Vec<u8>> = (0..size).map(|to| vec![ranks.rank() as u8, to as u8]).collect();
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let told = ranks.broadcast(&[ranks.rank() as u8 + 7]).unwrap();
            (gathered, ranks.all_to_all(&parts).unwrap(), told)
        });
        for (rank, (gathered, exchanged, told)) in all.into_iter().enumerate() {
            let expected: Vec<Vec<u8>> = (0..size).map(|r| vec![r as u8; r + 1]).collect();
            assert_eq!(gathered, expected);
            assert_eq!(exchanged, (0..size).map(|r| vec![r as u8, rank as u8]).collect::<Vec<_>>());
            assert_eq!(told, [7]);
        }
    }
}

#[test]
fn an_error_of_one_rank_is_the_error_of_all_and_they_stay_in_step() {
    let all = on_each(3, |ranks| {
        let failed = ranks.together(|| match ranks.rank() {
            1 => Err(Error::data("row 7 is broken").at("a.jsonl").fix("mend it")),
            _ => ranks.all_gather(b"fine").map(drop),
        });
        let after = ranks.together(|| ranks.all_gather(&[ranks.rank() as u8]));
        (failed.unwrap_err(), after.unwrap())
    });
    for (rank, (error, after)) in all.into_iter().enumerate() {
        assert_eq!(error.class, Class::Data);
        let place = if rank == 1 { "a.jsonl" } else { "rank 1: a.jsonl" };
        assert_eq!(error.to_string(), format!("{place}: row 7 is broken\n  fix: mend it"));
        assert_eq!(after, [[0], [1], [2]]);
    }
}

#[test]
fn a_rank_that_has_ended_is_not_waited_for() {
    let all = on_each(2, |ranks| match ranks.rank() {
        1 => None,
        _ => ranks.all_gather(b"where are you").err(),
    });
    let error = all[0].as_ref().expect("rank 1 is gone");
    assert_eq!((error.class, error.to_string()), (Class::Rank, "rank 1 has ended".to_string()));
}

#[test]
fn parts_cover_everything_once() {
    for count in [0, 1, 5, 4096, 4097] {
        for size in 1..=5 {
            let parts: Vec<_> = (0..size).map(|rank| part(count, rank, size)).collect();
            assert_eq!(parts[0].start, 0);
            assert_eq!(parts[size - 1].end, count);
            assert!(parts.windows(2).all(|w| w[0].end == w[1].start));
        }
    }
}

/// Two teams of two take different numbers of exchanges, an error in one stays in it, and all ranks are in step afterwards.
#[test]
fn teams_exchange_at_their_own_pace() {
    let all = on_each(4, |ranks| {
        let (team, own) = (ranks.team(2), [ranks.rank() as u8]);
        let members = team.all_gather(&own).unwrap().concat();
        let failed = team.in_step(|| {
            for _ in 0..members[0] {
                team.all_gather(b"more")?;
            }
            if ranks.rank() == 3 { Err(Error::data("row 7 is broken")) } else { Ok(()) }
        });
        let everybody = ranks.all_gather(&own).unwrap().concat();
        (members, failed.err().map(|e| e.to_string()), everybody)
    });
    let teams = [[0, 1], [0, 1], [2, 3], [2, 3]];
    let said = [None, None, Some("rank 3: row 7 is broken"), Some("row 7 is broken")];
    for (rank, (members, failed, everybody)) in all.into_iter().enumerate() {
        assert_eq!((members, failed.as_deref()), (teams[rank].to_vec(), said[rank]));
        assert_eq!(everybody, [0, 1, 2, 3]);
    }
}

/// What two exchanges bring that are on their way at once, while the next steps of a rank go on.
#[test]
fn exchanges_that_begin_early_bring_what_was_sent() {
    for size in 1..=4 {
        let all = on_each(size, |ranks| {
            let part = |round: u8| vec![vec![ranks.rank() as u8, round]; size];
            let mut seen = Vec::new();
            let mut coming = ranks.begin(part(0));
            for round in 1..6 {
                let next = ranks.begin(part(round));
                seen.push(ranks.wait(std::mem::replace(&mut coming, next)).unwrap());
            }
            seen.push(ranks.wait(coming).unwrap());
            (seen, ranks.all_gather(b"end").unwrap().len())
        });
        let brought = |round: u8| (0..size).map(|r| vec![r as u8, round]).collect::<Vec<_>>();
        let expected: Vec<_> = (0..6).map(brought).collect();
        assert!(all.iter().all(|(seen, end)| *seen == expected && *end == size), "{size} ranks");
    }
}

/// A rank fails at any moment, with none, one or two exchanges on their way on it and other numbers on others: all return its
/// error, and are in step afterwards.
#[test]
fn a_rank_that_fails_between_exchanges_leaves_all_in_step() {
    for moment in 0..12 {
        let all = on_each(3, |ranks| {
            let part = |round: u8| vec![vec![round]; 3];
            let failed = ranks.together(|| {
                let fails = |now| match ranks.rank() == 2 && now == moment {
                    true => Err(Error::data("row 7 is broken")),
                    false => Ok(()),
                };
                let (mut weights, mut gradients) = (None, None);
                for layer in 0..3u8 {
                    if let Some(coming) = weights.take() {
                        ranks.wait(coming)?;
                    }
                    fails(4 * layer as i32)?;
                    weights = Some(ranks.begin(part(layer)));
                    fails(4 * layer as i32 + 1)?;
                    if let Some(leaving) = gradients.take() {
                        ranks.wait(leaving)?;
                    }
                    fails(4 * layer as i32 + 2)?;
                    gradients = Some(ranks.begin(part(layer)));
                    fails(4 * layer as i32 + 3)?;
                }
                ranks.wait(weights.take().unwrap())?;
                ranks.wait(gradients.take().unwrap())?;
                ranks.all_gather(b"all").map(drop)
            });
            let after = ranks.together(|| ranks.all_gather(&[ranks.rank() as u8]));
            (failed.unwrap_err().to_string(), after.unwrap())
        });
        for (rank, (error, after)) in all.into_iter().enumerate() {
            let place = if rank == 2 { "" } else { "rank 2: " };
            assert_eq!(error, format!("{place}row 7 is broken"), "moment {moment}");
            assert_eq!(after, [[0], [1], [2]], "moment {moment}");
        }
    }
}

/// Parcels of other lengths for every rank, in both storage types, with pieces of no numbers.
#[test]
fn parcels_round_trip_between_ranks() {
    for connect in [threads, device_threads] {
        for size in 1..=4 {
            each_of(connect(size), |ranks| {
                let backend = crate::open(crate::BACKENDS[0].name, Some(1)).unwrap();
                let value = |from: usize, to: usize, i: usize| (40 * from + 10 * to + i) as f32;
                let pieces = |from: usize, to: usize| {
                    [(from + 3 * to, DType::F32), (5 * from, DType::Bf16), (0, DType::F32), (9, DType::F32)]
                        .map(|(len, format)| ParcelPiece { len, format })
                };
                let slot = |to: usize| ParcelContents {
                    note: vec![to as u8; 3],
                    pieces: pieces(ranks.rank(), to).into(),
                };
                let slots = (0..size).map(slot).collect();
                let mut outbox = Outbox::new(&ranks, &backend, Route::Each, slots).unwrap();
                for to in 0..size {
                    for piece in pieces(ranks.rank(), to) {
                        let mut buffer = backend.alloc(DType::F32, piece.len + 2).unwrap();
                        let values: Vec<f32> = (0..piece.len).map(|i| value(ranks.rank(), to, i)).collect();
                        backend.write(&mut buffer, 2, &values).unwrap();
                        outbox.push(to, &buffer, 2).unwrap();
                    }
                }
                let more = |from: usize| [&pieces(from, ranks.rank())[..], &[ParcelPiece::f32s(40)]].concat();
                let coming = ranks.begin_parcels(outbox, &(0..size).map(more).collect::<Vec<_>>()).unwrap();
                let mut inbox = ranks.receive(coming).unwrap();
                for from in 0..size {
                    assert_eq!(inbox.note(from, 3).unwrap(), [ranks.rank() as u8; 3]);
                    for (n, piece) in pieces(from, ranks.rank()).into_iter().enumerate() {
                        let mut buffer = backend.alloc(DType::F32, piece.len).unwrap();
                        let mut values = vec![0.0; piece.len];
                        backend.fill(&mut buffer, 1.0).unwrap();
                        match n {
                            0 => inbox.add(from, &mut buffer).unwrap(),
                            1 => inbox.write(from, piece, &mut buffer, 0).unwrap(),
                            _ => inbox.read(from, piece, &mut values).unwrap(),
                        }
                        if n < 2 {
                            backend.read(&buffer, 0, &mut values).unwrap();
                        }
                        let more = if n == 0 { 1.0 } else { 0.0 };
                        let expected = (0..piece.len).map(|i| value(from, ranks.rank(), i) + more);
                        assert_eq!(
                            values,
                            expected.collect::<Vec<_>>(),
                            "piece {n} of rank {from} of {size}"
                        );
                    }
                    inbox.end(from).unwrap();
                }
            });
        }
    }
}

/// Messages are converted in parts: pieces and blocks of several parts, one of them not full, and of rows longer than a part.
#[test]
fn long_pieces_arrive_whole() {
    each_of(threads(2), |ranks| {
        let backend = crate::open(crate::BACKENDS[0].name, Some(1)).unwrap();
        for (rows, width, format) in
            [(2, 70_000, DType::F32), (300, 701, DType::F32), (300, 701, DType::Bf16)]
        {
            let half = |member: usize| [0..width / 2, width / 2..width][member].clone();
            let block = |member| Block { rows: 0..rows, width, columns: vec![half(member)] };
            let values: Vec<f32> = (0..rows * width).map(|i| (i * 7 % 251) as f32).collect();
            let mut from = backend.alloc(format, values.len()).unwrap();
            backend.write(&mut from, 0, &values).unwrap();
            let pieces =
                |member| [block(member).len(), values.len()].map(|len| ParcelPiece { len, format }).to_vec();
            let slot = ParcelContents { note: Vec::new(), pieces: pieces(ranks.rank()) };
            let mut outbox = Outbox::new(&ranks, &backend, Route::Same(vec![0, 1]), vec![slot]).unwrap();
            outbox.push_block(0, &from, &block(ranks.rank())).unwrap();
            outbox.push(0, &from, 0).unwrap();
            let mut inbox = ranks.exchange_parcels(outbox, &[pieces(0), pieces(1)]).unwrap();
            let mut gathered = backend.alloc(format, values.len()).unwrap();
            let mut sent = backend.alloc(format, values.len()).unwrap();
            for member in 0..2 {
                inbox.write_block(member, &mut gathered, &block(member)).unwrap();
                inbox.write(member, ParcelPiece { len: values.len(), format }, &mut sent, 0).unwrap();
                inbox.end(member).unwrap();
            }
            for buffer in [gathered, sent] {
                let mut arrived = vec![0.0; values.len()];
                backend.read(&buffer, 0, &mut arrived).unwrap();
                assert!(arrived == values, "{rows} rows of {width} {format:?}");
            }
        }
    });
}

/// A rank fails while parcels are on their way, some of them behind its error: no rank waits for numbers that never come, and
/// the next ones are right.
#[test]
fn a_rank_that_fails_between_parcels_leaves_all_in_step() {
    for connect in [threads, device_threads] {
        for moment in 0..8 {
            let all = each_of(connect(3), |ranks| {
                let backend = crate::open(crate::BACKENDS[0].name, Some(1)).unwrap();
                let begin = |value: f32| {
                    let slot = ParcelContents { note: vec![7], pieces: vec![ParcelPiece::f32s(5)] };
                    let mut outbox = Outbox::new(&ranks, &backend, Route::Same(vec![0, 1, 2]), vec![slot])?;
                    let mut buffer = backend.alloc(DType::F32, 5)?;
                    backend.fill(&mut buffer, value)?;
                    outbox.push(0, &buffer, 0)?;
                    ranks.begin_parcels(outbox, &vec![vec![ParcelPiece::f32s(5)]; 3])
                };
                let failed = ranks.together(|| {
                    let fails = |now| match ranks.rank() == 2 && now == moment {
                        true => Err(Error::data("row 7 is broken")),
                        false => Ok(()),
                    };
                    let mut before = None;
                    for layer in 0..4 {
                        fails(2 * layer)?;
                        let next = begin(layer as f32)?;
                        fails(2 * layer + 1)?;
                        if let Some(coming) = before.replace(next) {
                            ranks.receive(coming)?;
                        }
                    }
                    ranks.receive(before.expect("the last one"))?;
                    ranks.all_gather(b"all").map(drop)
                });
                let mut inbox = ranks.receive(begin(ranks.rank() as f32).unwrap()).unwrap();
                let mut sum = backend.alloc(DType::F32, 5).unwrap();
                backend.fill(&mut sum, 0.0).unwrap();
                for from in 0..3 {
                    assert_eq!(inbox.note(from, 1).unwrap(), [7]);
                    inbox.add(from, &mut sum).unwrap();
                }
                let mut values = [0.0; 5];
                backend.read(&sum, 0, &mut values).unwrap();
                (failed.unwrap_err().to_string(), values)
            });
            for (rank, (error, values)) in all.into_iter().enumerate() {
                let place = if rank == 2 { "" } else { "rank 2: " };
                assert_eq!(error, format!("{place}row 7 is broken"), "moment {moment}");
                assert_eq!(values, [3.0; 5], "moment {moment}");
            }
        }
    }
}

/// Columns of rows, in groups of ranks: one range and several, none, and of no rows.
#[test]
fn blocks_travel_in_groups() {
    for connect in [threads, device_threads] {
        each_of(connect(4), |all| {
            let backend = crate::open(crate::BACKENDS[0].name, Some(1)).unwrap();
            for (size, format) in [(2, DType::F32), (4, DType::Bf16), (2, DType::Bf16)] {
                let (ranks, rows) = (all.team(size), 3);
                // A member has two ranges of a row of 11 columns, or none.
                let columns = |member: usize| match member {
                    0 => vec![1..3, 6..11],
                    1 => vec![0..1, 3..6],
                    _ => Vec::new(),
                };
                let block = |member| Block { rows: 0..rows, width: 11, columns: columns(member) };
                let values: Vec<f32> = (0..11 * rows).map(|i| i as f32).collect();
                let mut from = backend.alloc(format, values.len()).unwrap();
                backend.write(&mut from, 0, &values).unwrap();
                let own = block(ranks.rank());
                let empty = Block { rows: 2..2, ..block(0) };
                let pieces = |block: &Block| [block.len(), 0].map(|len| ParcelPiece { len, format }).to_vec();
                let slot = ParcelContents { note: vec![1], pieces: pieces(&own) };
                let to = Route::Same((0..size).collect());
                let mut outbox = Outbox::new(&ranks, &backend, to, vec![slot]).unwrap();
                outbox.push_block(0, &from, &own).unwrap();
                outbox.push_block(0, &from, &empty).unwrap();
                let expected: Vec<_> = (0..size).map(|member| pieces(&block(member))).collect();
                let mut inbox = ranks.exchange_parcels(outbox, &expected).unwrap();
                let mut whole = backend.alloc(format, values.len()).unwrap();
                backend.fill(&mut whole, -1.0).unwrap();
                for member in 0..size {
                    assert_eq!(inbox.note(member, 1).unwrap(), [1]);
                    inbox.write_block(member, &mut whole, &block(member)).unwrap();
                    inbox.write_block(member, &mut whole, &empty).unwrap();
                    inbox.end(member).unwrap();
                }
                let mut arrived = vec![0.0; values.len()];
                backend.read(&whole, 0, &mut arrived).unwrap();
                assert_eq!(arrived, values, "{size} members");
            }
        });
    }
}

/// A member of a group fails while blocks are on their way: the others of its group return its error, those of another group go on,
/// and all groups are in step afterwards.
#[test]
fn a_member_that_fails_ends_the_exchanges_of_its_group_alone() {
    for connect in [threads, device_threads] {
        for moment in 0..4 {
            let done = each_of(connect(4), |all| {
                let backend = crate::open(crate::BACKENDS[0].name, Some(1)).unwrap();
                let team = all.team(2);
                let exchange = |value: f32| -> Result<f32> {
                    let slot = ParcelContents { note: Vec::new(), pieces: vec![ParcelPiece::f32s(3)] };
                    let mut outbox = Outbox::new(&team, &backend, Route::Same(vec![0, 1]), vec![slot])?;
                    let mut buffer = backend.alloc(DType::F32, 3)?;
                    backend.fill(&mut buffer, value)?;
                    outbox.push(0, &buffer, 0)?;
                    let mut inbox = team.exchange_parcels(outbox, &vec![vec![ParcelPiece::f32s(3)]; 2])?;
                    let mut sum = backend.alloc(DType::F32, 3)?;
                    backend.fill(&mut sum, 0.0)?;
                    (0..2).try_for_each(|from| inbox.add(from, &mut sum))?;
                    let mut values = [0.0; 3];
                    backend.read(&sum, 0, &mut values)?;
                    Ok(values[0])
                };
                let step = team.in_step(|| {
                    for now in 0..4 {
                        if all.rank() == 3 && now == moment {
                            return Err(Error::data("row 7 is broken"));
                        }
                        exchange(now as f32)?;
                    }
                    Ok(())
                });
                let after = exchange(1.0 + all.rank() as f32).unwrap();
                (step.map_err(|e| e.to_string()), after)
            });
            let failed = |place: &str| Err(format!("{place}row 7 is broken"));
            assert_eq!(done[0], (Ok(()), 3.0));
            assert_eq!(done[1], (Ok(()), 3.0));
            assert_eq!(done[2], (failed("rank 3: "), 7.0), "moment {moment}");
            assert_eq!(done[3], (failed(""), 7.0), "moment {moment}");
        }
    }
}
