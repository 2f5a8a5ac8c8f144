//! Programs that try to get out. Each prints ESCAPED where it got what it wanted.

use ferrl::sandbox::{Confinement, Confinement::*};

/// How it is shown that an attack works where nothing stops it, so that no test passes for want of an attack.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// In mode `off`.
    Off,
    /// In mode `off`, if that is root.
    OffRoot,
    /// In a sandbox without the layers that stop it, as root: mode `off` would harm the host.
    Without,
    /// With larger limits.
    Larger,
    /// Not shown: it would harm the host, or nothing can be left out.
    Never,
}
use Control::*;

pub struct Attack {
    pub name: &'static str,
    /// Each of these stops it alone; none where what stops it is no layer but always there.
    pub layers: &'static [Confinement],
    pub control: Control,
    pub code: &'static str,
}

const fn attack(
    name: &'static str,
    layers: &'static [Confinement],
    control: Control,
    code: &'static str,
) -> Attack {
    Attack { name, layers, control, code }
}

/// Before every attack: `call` is a system call, `refused` the error of one.
pub const PRELUDE: &str = r#"
import os, sys
DIR, PID, TCP, UDP, NAME = sys.argv[2:7]
PID, TCP, UDP = int(PID), int(TCP), int(UDP)
def won():
    print("ESCAPED", flush=True)
def call(number, *arguments):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads whole words; of a plain int ctypes writes half of one, over whatever lies on the stack.
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    return result, ctypes.get_errno()
def libc():
    import ctypes
    return ctypes.CDLL(None, use_errno=True)
"#;

pub const ATTACKS: &[Attack] = &[
    // Network and sockets.
    attack(
        "tcp connect",
        &[Net, Seccomp],
        Off,
        "import socket; socket.create_connection(('127.0.0.1', TCP), 2); won()",
    ),
    attack(
        "udp send",
        &[Net, Seccomp],
        Off,
        "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', UDP)); won()",
    ),
    attack(
        "tcp listen",
        &[Seccomp],
        Off,
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); won()",
    ),
    attack(
        "unix socket by path",
        &[Mount, Seccomp],
        Off,
        "import socket; socket.socket(1).connect(DIR + '/socket'); won()",
    ),
    attack(
        "unix socket by abstract name",
        &[Net, Scope, Seccomp],
        Off,
        "import socket; socket.socket(1).connect('\\0' + NAME); won()",
    ),
    attack("raw socket", &[User, Seccomp], OffRoot, "import socket; socket.socket(2, 3, 1); won()"),
    attack("packet socket", &[User, Seccomp], OffRoot, "import socket; socket.socket(17, 3); won()"),
    attack("netlink socket", &[Seccomp], Off, "import socket; socket.socket(16, 3, 0); won()"),
    attack(
        "io_uring",
        &[Seccomp],
        Off,
        "import ctypes; p = ctypes.create_string_buffer(120); r, e = call(425, 4, p); r >= 0 and won()",
    ),
    // Files.
    attack("read a file of the user", &[Mount, Landlock], Off, "open(DIR + '/secret').read(); won()"),
    attack("read /etc/passwd", &[Mount, Landlock], Off, "open('/etc/passwd').read(); won()"),
    attack("read /etc/shadow", &[Mount, Landlock, User], OffRoot, "open('/etc/shadow').read(); won()"),
    attack("list a folder of the user", &[Mount, Landlock], Off, "os.listdir(DIR); won()"),
    attack("stat a file of the user", &[Mount], Off, "os.stat(DIR + '/secret'); won()"),
    attack(
        "watch a folder of the user",
        &[Mount],
        Off,
        "l = libc(); l.inotify_add_watch(l.inotify_init(), DIR.encode(), 0xfff) > 0 and won()",
    ),
    attack("create a file outside", &[Mount, Landlock], Off, "open(DIR + '/new', 'w').write('x'); won()"),
    attack("overwrite a file", &[Mount, Landlock], Off, "open(DIR + '/victim', 'w').write('x'); won()"),
    attack("append to a file", &[Mount, Landlock], Off, "open(DIR + '/victim', 'a').write('x'); won()"),
    attack("truncate a file", &[Mount], Off, "os.truncate(DIR + '/victim', 0); won()"),
    attack("delete a file", &[Mount, Landlock], Off, "os.remove(DIR + '/deleted'); won()"),
    attack("rename a file", &[Mount, Landlock], Off, "os.rename(DIR + '/renamed', DIR + '/renamed2'); won()"),
    attack(
        "hard link into the scratch folder",
        &[Mount, Landlock],
        Off,
        "os.link(DIR + '/secret', DIR + '/link'); won()",
    ),
    attack(
        "symbolic link out of the scratch folder",
        &[Mount, Landlock],
        Off,
        "os.symlink(DIR + '/secret', 'link'); open('link').read(); won()",
    ),
    attack("dots in a path", &[Mount, Landlock], Off, "open('../' * 30 + DIR + '/secret').read(); won()"),
    attack("make a folder outside", &[Mount, Landlock], Off, "os.mkdir(DIR + '/folder'); won()"),
    attack("change a mode", &[Mount, Seccomp], Off, "os.chmod(DIR + '/victim', 0o777); won()"),
    attack("change an owner", &[Mount, Seccomp, User], OffRoot, "os.chown(DIR + '/victim', 1, 1); won()"),
    attack("change times", &[Mount, Seccomp], Off, "os.utime(DIR + '/victim', (1, 1)); won()"),
    attack(
        "shared memory file",
        &[Mount, Landlock],
        Off,
        "p = '/dev/shm/' + NAME; open(p, 'w').write('x'); os.remove(p); won()",
    ),
    attack(
        "write into Python's library",
        &[Mount, Landlock, User],
        OffRoot,
        "p = os.__file__ + '.' + NAME; open(p, 'w').close(); os.remove(p); won()",
    ),
    attack(
        "the kernel's log device",
        &[Mount, Landlock, User],
        OffRoot,
        "open('/dev/kmsg', 'rb', buffering=0); won()",
    ),
    attack(
        "environment of another process",
        &[Mount, Landlock, User],
        Off,
        "open('/proc/%d/environ' % PID).read(); won()",
    ),
    attack(
        "memory of another process",
        &[Mount, Landlock, User],
        OffRoot,
        "open('/proc/%d/mem' % PID, 'rb'); won()",
    ),
    attack(
        "another program reads for it",
        &[Mount, Landlock],
        Off,
        "import subprocess; subprocess.run(['/bin/cat', DIR + '/secret'], stdin=-3).returncode == 0 and won()",
    ),
    attack(
        "a shell reads for it",
        &[Mount, Landlock],
        Off,
        "os.system('cat %s/secret > copy' % DIR) == 0 and won()",
    ),
    attack(
        "make a device",
        &[User, Landlock],
        OffRoot,
        "os.mknod('device', 0o60666, os.makedev(8, 0)); won()",
    ),
    attack(
        "file handles",
        &[Seccomp],
        Off,
        "import ctypes; h = ctypes.create_string_buffer(b'\\x80\\0\\0\\0', 136); m = ctypes.c_int(); r, e = call(303, -100, b'/', h, ctypes.byref(m), 0); r == 0 and won()",
    ),
    attack("chroot", &[User, Seccomp], OffRoot, "os.chroot('.'); won()"),
    attack(
        "mount",
        &[User, Seccomp, Landlock],
        Without,
        "libc().mount(b'x', os.getcwd().encode(), b'tmpfs', 0, None) == 0 and won()",
    ),
    attack(
        "unmount",
        &[User, Seccomp, Landlock],
        Without,
        "os.chdir('/'); libc().umount2(os.environ['HOME'].encode(), 2) == 0 and won()",
    ),
    attack("namespaces by unshare", &[Seccomp], OffRoot, "libc().unshare(0x10000000) == 0 and won()"),
    attack(
        "namespaces by clone",
        &[Seccomp],
        OffRoot,
        "r, e = call(56, 0x10000000 | 17, 0, 0, 0, 0)\nif r == 0: os._exit(0)\nr > 0 and won()",
    ),
    attack(
        "clone3, whose flags no filter reads",
        &[Seccomp],
        Off,
        "r, e = call(435, None, 0); e != 38 and won()",
    ),
    attack(
        "enter a namespace",
        &[Seccomp, User, Mount, Landlock],
        OffRoot,
        "f = open('/proc/%d/ns/net' % PID); libc().setns(f.fileno(), 0) == 0 and won()",
    ),
    // Other processes.
    attack("signal a process", &[Pid, Scope, User], Off, "os.kill(PID, 23); won()"),
    attack("signal all processes", &[Pid], Off, "os.kill(-1, 23); won()"),
    attack("signal the parent", &[Pid, Scope, User], Off, "p = os.getppid(); p and (os.kill(p, 23), won())"),
    attack(
        "trace a process",
        &[Pid, Seccomp, User],
        OffRoot,
        "l = libc(); l.ptrace(16, PID, 0, 0) == 0 and (os.waitpid(PID, 0x40000000), l.ptrace(17, PID, 0, 0), won())",
    ),
    attack(
        "read memory by system call",
        &[Seccomp],
        OffRoot,
        "import ctypes; b = ctypes.create_string_buffer(8); v = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8); r, e = call(310, os.getpid(), v, 1, v, 1, 0); r == 8 and won()",
    ),
    attack(
        "take a file of another process",
        &[Pid, Seccomp, User],
        OffRoot,
        "f, e = call(434, PID, 0); r, e = call(438, f, 0, 0); r >= 0 and won()",
    ),
    attack("slow another process down", &[Pid, User], Off, "os.setpriority(os.PRIO_PROCESS, PID, 5); won()"),
    attack("pin another process", &[Pid, User], Off, "os.sched_setaffinity(PID, {0}); won()"),
    attack(
        "limit another process",
        &[Pid, User],
        Off,
        "import resource as r; r.prlimit(PID, r.RLIMIT_NOFILE, (100, 100)); won()",
    ),
    // Memory and queues that outlive a process.
    attack("memory file", &[Seccomp], Off, "os.memfd_create('x'); won()"),
    attack(
        "System V shared memory",
        &[Seccomp],
        Off,
        "l = libc(); i = l.shmget(0, 4096, 0o1600); i >= 0 and (l.shmctl(i, 0, None), won())",
    ),
    attack(
        "System V semaphores",
        &[Seccomp],
        Off,
        "l = libc(); i = l.semget(0, 1, 0o1600); i >= 0 and (l.semctl(i, 0, 0), won())",
    ),
    attack(
        "System V messages",
        &[Seccomp],
        Off,
        "l = libc(); i = l.msgget(0, 0o1600); i >= 0 and (l.msgctl(i, 0, None), won())",
    ),
    attack(
        "message queue",
        &[Seccomp],
        Off,
        "r, e = call(240, b'ferrl' + str(os.getpid()).encode(), 0o102, 0o600, None); r >= 0 and (call(241, b'ferrl' + str(os.getpid()).encode()), won())",
    ),
    attack("kernel keyring", &[Seccomp], Off, "r, e = call(250, 0, -2, 1); e == 1 or won()"),
    // The kernel and the machine.
    attack("bpf", &[Seccomp], OffRoot, "r, e = call(321, 0, None, 0); e == 1 or won()"),
    attack("performance counters", &[Seccomp], Off, "r, e = call(298, None, 0, 0, 0, 0); e == 1 or won()"),
    attack("userfaultfd", &[Seccomp], OffRoot, "r, e = call(323, 0); e == 1 or won()"),
    attack("reboot", &[User, Seccomp], OffRoot, "r, e = call(169, 0, 0, 0, 0); e == 1 or won()"), // with wrong magic numbers
    attack("swap", &[User, Seccomp], OffRoot, "r, e = call(168, b'/nothing'); e == 1 or won()"),
    attack("kernel log", &[User, Seccomp], OffRoot, "libc().klogctl(10, None, 0) >= 0 and won()"),
    attack("host name", &[User, Seccomp], Without, "libc().sethostname(b'x', 1) == 0 and won()"),
    attack("set the clock", &[Seccomp], OffRoot, "r, e = call(227, 99, None); e == 1 or won()"), // of no clock there is
    attack("another personality", &[Seccomp], Off, "libc().personality(0x0040000) >= 0 and won()"),
    attack("outlive the supervisor", &[Seccomp], Off, "libc().prctl(1, 0, 0, 0, 0) == 0 and won()"),
    attack("become root", &[User], OffRoot, "os.setuid(0); os.setgid(0); won()"),
    attack("keep capabilities", &[User], OffRoot, "os.nice(-1); won()"),
    // Limits.
    attack("open many files", &[Rlimits], Off, "f = [open('/dev/null') for i in range(200)]; won()"),
    attack("allocate in one process", &[Rlimits], Larger, "b = bytearray(300 << 20); won()"),
    attack(
        "allocate shared memory",
        &[Rlimits],
        Larger,
        "import mmap; m = mmap.mmap(-1, 300 << 20); m.write(b'x' * (250 << 20)); won()",
    ),
    attack(
        "a file that is too large",
        &[Rlimits, Mount],
        Larger,
        "f = open('file', 'wb')\nfor i in range(20): f.write(b'x' * (1 << 20)); f.flush()\nwon()",
    ),
    attack(
        "many files that are too large together",
        &[Mount],
        Larger,
        "for i in range(20): open(str(i), 'wb').write(b'x' * (1 << 20))\nwon()",
    ),
    attack(
        "more files than there is room for",
        &[Mount],
        Off,
        "for i in range(3000): open(str(i), 'w').close()\nwon()",
    ),
    attack(
        "raise its own limits",
        &[],
        Never,
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); won()",
    ),
    attack(
        "a hundred processes",
        &[],
        Larger,
        "import time\nfor i in range(100):\n    if os.fork() == 0: time.sleep(20); os._exit(0)\nwon()",
    ),
    attack(
        "a hundred threads",
        &[],
        Larger,
        "import threading, time\nfor i in range(100): threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\nwon()",
    ),
    attack(
        "variables of the environment",
        &[],
        Never,
        "ours = {'HOME', 'TMPDIR', 'PATH', 'LANG', 'LC_CTYPE', 'PYTHONHASHSEED', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MALLOC_ARENA_MAX'}\nset(os.environ) - ours and won()",
    ),
    attack(
        "open files of the parent",
        &[],
        Never,
        "for fd in range(3, 300):\n    try: os.fstat(fd); won()\n    except OSError: pass",
    ),
];

/// Programs that do not end by themselves, and how they are ended.
pub const ENDLESS: &[(&str, &str, &str)] = &[
    ("endless loop", "time-out", "while True: pass"),
    ("endless sleep", "time-out", "import time; time.sleep(1000)"),
    (
        "deaf to signals",
        "time-out",
        "import signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(1000)",
    ),
    ("flood of stdout", "output limit", "while True: print('x' * 10000)"),
    ("flood of stderr", "output limit", "while True: sys.stderr.write('x' * 10000)"),
    (
        "flood by a child",
        "output limit",
        "if os.fork() == 0:\n    while True: os.write(1, b'x' * 10000)\nos.wait()",
    ),
    (
        "memory of many processes",
        "memory limit",
        "import time\nfor i in range(6):\n    if os.fork() == 0: b = bytearray(60 << 20); time.sleep(1000)\ntime.sleep(1000)",
    ),
    (
        "children without end",
        "time-out",
        "import time\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(1000)\n    except OSError: time.sleep(0.01)",
    ),
    (
        "a chain of children that end at once",
        "time-out",
        "import time\nif os.fork() == 0:\n    while True:\n        try:\n            if os.fork(): os._exit(0)\n        except OSError: time.sleep(0.001)\ntime.sleep(1000)",
    ),
];

/// The one of [`LEFT_BEHIND`] that does not hold stdout.
pub const ENDS_BY_ITSELF: &str = "a daemon without open files";

/// Programs that leave a process behind; its command line holds the mark.
pub const LEFT_BEHIND: &[(&str, &str)] = &[
    (
        "a daemon",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: os.execv('/bin/sleep', ['sleep', MARK])\n    os._exit(0)\nos.wait()",
    ),
    (
        "a child in a session of its own",
        "import subprocess; subprocess.Popen(['/bin/sleep', MARK], start_new_session=True)",
    ),
    ("a child that holds stdout", "if os.fork() == 0: os.execv('/bin/sleep', ['sleep', MARK])"),
    (
        ENDS_BY_ITSELF,
        "if os.fork() == 0:\n    os.setsid()\n    for fd in range(3): os.close(fd)\n    if os.fork() == 0: os.execv('/bin/sleep', ['sleep', MARK])\n    os._exit(0)\nos.wait()",
    ),
    (
        "a child while it loops",
        "if os.fork() == 0: os.setsid(); os.execv('/bin/sleep', ['sleep', MARK])\nwhile True: pass",
    ),
];
