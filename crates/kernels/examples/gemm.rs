use ferrl_kernels::cpu::{matmul::*, pool::*, simd::*};
use matmul::pack::*;
use ferrl_kernels::cpu::matmul;
use std::time::Instant;
fn best(mut f: impl FnMut()) -> f64 { let mut b=f64::MAX; for _ in 0..9 { let t=Instant::now(); f(); b=b.min(t.elapsed().as_secs_f64()); } b }
fn main(){
  let level=Level::from_env().unwrap();
  let threads: usize = std::env::args().nth(1).map(|s|s.parse().unwrap()).unwrap_or(2);
  let pool=Pool::new(threads);
  let mut gf=0.0; let mut gb=0.0; let mut c=0.0;
  for (m,n,k) in [(2048,256,256),(2048,1024,256),(2048,256,1024),(2048,896,896),(2048,4864,896),(2048,896,4864),(2048,32000,256),(1,256,256),(8,256,256),(32,256,256),(32,1024,256),(32,4864,896),(1,4864,896)] {
    let x:Vec<f32>=(0..m*k).map(|i| ((i*7919%1000) as f32)/500.0-1.0).collect();
    let w:Vec<f32>=(0..n*k).map(|i| ((i*104729%1000) as f32)/500.0-1.0).collect();
    let sh=Shape{n,k};
    let mut pf=vec![0f32;sh.storage::<f32>()]; pack_weight::<f32>(&pool,&w,sh,&mut pf);
    let mut pb=vec![0u32;sh.storage::<u16>()]; let tp=best(||pack_weight::<u16>(&pool,&w,sh,&mut pb));
    let xb:Vec<u16>=x.iter().map(|&v|narrow(v)).collect();
    let mut o=vec![0f32;m*n]; let mut ob=vec![0u16;m*n];
    let rep=if m*n*k<10_000_000 {200} else {1};
    let t1=best(||for _ in 0..rep {linear(level,&pool,&x,Packed{shape:sh,data:&pf},None,Out::F32(Disjoint::new(&mut o)))})/rep as f64;
    let t2=best(||for _ in 0..rep {linear(level,&pool,&xb,Packed{shape:sh,data:&pb},None,Out::Bf16(Disjoint::new(&mut ob)))})/rep as f64;
    // check
    let mut err=0f64; for i in (0..m*n).step_by(m*n/17+1) { let (r,cc)=(i/n,i%n); let s:f64=(0..k).map(|q| x[r*k+q] as f64*w[cc*k+q] as f64).sum(); err=err.max((s-o[i] as f64).abs()); }
    let fl=2.0*(m*n*k) as f64/1e9;
    println!("{m}x{n}x{k} nt f32 {:.0} bf16 {:.0} GF/s  pack {:.2}ms err {err:.1e}",fl/t1,fl/t2,tp*1e3);
    if m==2048 { gf+=(fl/t1).ln(); gb+=(fl/t2).ln(); c+=1.0;
      // dW: dy [m,n], x [m,k]
      if n<5000 {
      let dyb:Vec<u16>=ob.clone(); let dy=o.clone();
      let mut dw=vec![0f32;n*k]; let xs=Shape{n:k,k:m};
      let mut px=vec![0f32;xs.storage::<f32>()]; let mut pxb=vec![0u32;xs.storage::<u16>()];
      let t1=best(||{pack_tokens(level,&pool,&x,xs,&mut px);accumulate_dw(level,&pool,&dy,Packed{shape:xs,data:&px},&mut dw)});
      let t2=best(||{pack_tokens(level,&pool,&xb,xs,&mut pxb);accumulate_dw(level,&pool,&dyb,Packed{shape:xs,data:&pxb},&mut dw)});
      println!("    dW f32 {:.0} bf16 {:.0}",fl/t1,fl/t2);
      }
    }
  }
  println!("geomean nt f32 {:.0} bf16 {:.0}",(gf/c as f64).exp(),(gb/c as f64).exp());
}
