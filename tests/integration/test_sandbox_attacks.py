"""What a command may try, and that it fails: the host is unchanged, the trainer lives, the sandbox next door does not notice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from sao.errors import SandboxFailure
from sao.sandbox import kernel, seccomp
from sao.sandbox.client import RemoteSandbox, Sandboxes
from sao.sandbox.protocol import FileAccess, SandboxSpec

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]
SECRET = f"secret-{secrets.token_hex(8)}"
SMALL = SandboxSpec(memory_mb=256, disk_mb=32, processes=32, cpu_s=10, timeout_s=10.0)
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else "python3"


class Node:
    """One daemon with a victim's sandbox beside each attacker's."""

    def __init__(self, backend):
        self.backend = backend
        self.sandboxes = Sandboxes(backend, key=f"attacks {os.getpid()}")
        self.uids = set()

    def attack(self, script, spec=SMALL, **options):
        """The result of a shell script in a fresh sandbox; afterwards nothing of it runs and the victim is well."""
        return asyncio.run(self._attack(script, spec, options))

    async def _attack(self, script, spec, options):
        async with self.box(spec) as victim, self.box(spec) as attacker:
            await victim.write("mine.txt", b"untouched")
            uid = int((await attacker.exec("id -u")).out)
            result = await attacker.exec(script, **options)
            assert await over(uid), "processes survived"
            assert await victim.read("mine.txt") == b"untouched"
            assert (await victim.exec("cat mine.txt")).out == b"untouched"
            assert (await attacker.exec("echo alive")).rc in (0, 1, 2, 126)  # it may have filled its own disk; it still answers
        return result

    @contextlib.asynccontextmanager
    async def box(self, spec=SMALL):
        sandbox = await self.sandboxes.create(spec)
        try:
            yield sandbox
        finally:
            await sandbox.close()


def running_as(uid):
    """Processes of a uid, zombies included. 0: sandboxes share the tester's uid, which tells nothing."""
    if uid == os.getuid():
        return []
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                found.append(int(name))
    return found


async def over(uid):
    """Whether nothing of a uid is left, or soon is: what is killed takes a moment to end."""
    for _ in range(100):
        if not running_as(uid):
            return True
        await asyncio.sleep(0.02)
    return False


@pytest.fixture(scope="module", params=["bwrap", "landlock"])
def node(request):
    if request.param == "landlock" and not kernel.landlock_abi():
        pytest.skip("this kernel has no Landlock")
    os.environ["SAO_TEST_SECRET"] = SECRET
    node = Node(request.param)
    asyncio.run(node.sandboxes.start())
    yield node
    asyncio.run(node.sandboxes.end())


@pytest.fixture(scope="module")
def bwrap():
    node = Node("bwrap")
    asyncio.run(node.sandboxes.start())
    yield node
    asyncio.run(node.sandboxes.end())


def run_python(code):
    """A shell script that runs Python code from its own standard input."""
    return f"{PYTHON} -S - <<'END'\n{textwrap.dedent(code)}\nEND"


# ---------------------------------------------------------------- exhaustion


def test_a_fork_bomb_ends_with_its_sandbox(bwrap):
    result = bwrap.attack("bomb() { bomb | bomb & }; bomb; sleep 3; bomb; wait", timeout_s=5)
    assert result.seconds < 9


def test_a_bomb_of_threads_is_bounded(bwrap):
    code = """
        import threading, time
        n = 0
        try:
            while n < 500:
                threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
                n += 1
        except RuntimeError:
            pass
        print(n)
    """
    assert int(bwrap.attack(run_python(code)).out) < SMALL.processes


def test_memory_of_all_processes_together_is_bounded(node):
    code = """
        import os, time
        for _ in range(3):
            if os.fork() == 0:
                break
        block = b"x" * (130 << 20)
        time.sleep(8)
    """
    result = node.attack(run_python(code))
    assert result.killed_by == "memory" and result.seconds < 8


def test_one_process_cannot_take_more_than_the_limit(node):
    result = node.attack(run_python("block = b'x' * (400 << 20)"))
    assert result.rc == 1 and b"MemoryError" in result.out


def test_what_no_process_owns_is_bounded(bwrap):
    """Files of /dev/shm and /tmp, memory files, System V segments, names."""
    fill = (
        "for d in /workspace /tmp /dev/shm; do dd if=/dev/zero of=$d/big bs=1M count=100 2>/dev/null; done; du -cm /workspace /tmp /dev/shm | tail -1"
    )
    assert int(bwrap.attack(fill).text.split()[0]) <= SMALL.disk_mb + 2
    names = "cd /dev/shm && seq 1 60000 | xargs touch 2>/dev/null; ls -U /dev/shm | wc -l"
    assert int(bwrap.attack(names).out) < 4096 + 128 * SMALL.disk_mb
    assert (
        b"ENOSYS" in bwrap.attack(run_python("import os, errno\ntry: os.memfd_create('x')\nexcept OSError as e: print(errno.errorcode[e.errno])")).out
    )


def test_a_full_disk_is_the_command_s_own_trouble(node):
    async def fill():
        async with node.box() as box, node.box() as other:
            result = await box.exec("dd if=/dev/zero of=a bs=1M count=20 && dd if=/dev/zero of=b bs=1M count=20; cat a > c")
            assert result.rc and (b"No space left" in result.out or result.killed_by == "disk")
            with pytest.raises(FileAccess, match="No space"):
                await box.write("d", bytes(20 << 20))
            await other.write("fine", bytes(20 << 20))
            assert (await box.exec("rm -f a b c && echo again > e && cat e")).out == b"again\n"

    asyncio.run(fill())


def test_a_flood_of_output_is_cut_while_it_is_read(node):
    before = resident_of(node)
    result = node.attack("yes | tr -d '\\n'; yes >&2", output_kb=16)
    assert result.killed_by == "output" and result.truncated and len(result.out) < 17 * 1024 and b"bytes not shown" in result.out
    assert resident_of(node) - before < 8 << 20


def resident_of(node):
    pid = asyncio.run(node.sandboxes.ask({"ask": "hello"}))[0]["pid"]
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_command_that_closes_its_output_still_ends(node):
    result = node.attack("exec >&- 2>&-; sleep 60", timeout_s=1)
    assert result.timed_out and result.seconds < 5


def test_stopping_does_not_save_from_the_time_limit(node):
    result = node.attack("trap '' TERM INT HUP; kill -STOP $$; sleep 60", timeout_s=1)
    assert result.timed_out and result.killed_by == "timeout" and result.seconds < 5


# ---------------------------------------------------------------- reaching out


@pytest.fixture
def bait():
    """A file of the host that only its owner may read, and one that anybody may write."""
    folder = Path(tempfile.mkdtemp(prefix="bait-", dir="/tmp"))
    folder.chmod(0o777)
    (folder / "secret.txt").write_text(SECRET)
    (folder / "secret.txt").chmod(0o644)
    (folder / "writable").write_text("as it was")
    (folder / "writable").chmod(0o666)
    yield folder
    assert (folder / "writable").read_text() == "as it was"
    assert sorted(p.name for p in folder.iterdir()) == ["secret.txt", "writable"]
    shutil.rmtree(folder)


def test_nothing_of_the_host_can_be_written(node, bait):
    places = [
        bait,
        "/",
        "/usr",
        "/usr/bin",
        "/usr/local/lib",
        "/etc",
        "/root",
        "/home",
        "/var/lib",
        "/opt",
        "/proc/sys/kernel",
        "/dev",
        "/lib",
        "/run",
        "/sys",
    ]
    name = f"planted-{secrets.token_hex(4)}"
    script = "\n".join([*(f"echo x > {place}/{name} && echo WROTE {place}" for place in places), f"echo x > {bait}/writable && echo WROTE"])
    result = node.attack(
        script + "\nsysctl -w kernel.hostname=x && echo WROTE; echo c > /proc/sysrq-trigger && echo WROTE; chmod 777 /etc /usr && echo WROTE"
    )
    assert b"WROTE" not in result.out
    assert not [place for place in places if os.path.exists(f"{place}/{name}")]


def test_the_trainer_s_environment_and_files_cannot_be_read(node, bait):
    me = os.getpid()
    script = f"""
        cat /proc/*/environ /proc/{me}/environ /proc/{os.getppid()}/environ /proc/1/environ | tr '\\0' '\\n'
        env
        cat {bait}/secret.txt /etc/shadow /root/.bash_history /root/.ssh/* /proc/1/root/etc/shadow /proc/{me}/root/etc/shadow /proc/{me}/cwd/README.md
        cat /proc/kcore /dev/mem /proc/{me}/mem /proc/{me}/maps | head -c 100
        grep -r {SECRET} /tmp /home /var /run /dev/shm /workspace
        ps aux | grep -v 'ps aux'
    """
    result = node.attack(script)
    assert SECRET.encode() not in result.out.replace(f"grep -r {SECRET}".encode(), b"")
    assert b"root:" not in result.out and b"pytest" not in result.out


def test_no_network_loopback_metadata_or_socket_of_the_host(node):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        path = tempfile.mktemp(dir="/tmp")
        abstract.bind("\0" + (hidden := secrets.token_hex(8)))
        abstract.listen()
        named.bind(path)
        os.chmod(path, 0o777)
        named.listen()
        code = f"""
            import socket
            def reach(family, kind, address):
                try:
                    with socket.socket(family, kind) as s:
                        s.settimeout(1)
                        s.connect(address)
                        s.send(b"x")
                    print("REACHED", address)
                except OSError:
                    pass
            reach(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {listener.getsockname()[1]}))
            reach(socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80))
            reach(socket.AF_INET, socket.SOCK_STREAM, ("10.0.0.1", 80))
            reach(socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53))
            reach(socket.AF_INET6, socket.SOCK_STREAM, ("::1", {listener.getsockname()[1]}))
            reach(socket.AF_UNIX, socket.SOCK_STREAM, b"\\x00{hidden}")
            reach(socket.AF_UNIX, socket.SOCK_STREAM, "{path}")
            reach(socket.AF_UNIX, socket.SOCK_STREAM, "{node.sandboxes.directory}/socket")
            reach(socket.AF_UNIX, socket.SOCK_STREAM, "/var/run/docker.sock")
            for family in (40, 17, 38, 29):  # vsock, packet, alg, can
                try:
                    socket.socket(family, socket.SOCK_RAW if family == 17 else socket.SOCK_STREAM)
                    print("REACHED family", family)
                except OSError:
                    pass
            print("tried")
        """
        result = node.attack(run_python(code))
        os.unlink(path)
    assert result.out == b"tried\n"


def test_sandboxes_do_not_see_each_other(node):
    async def look():
        async with node.box() as victim, node.box() as attacker:
            await victim.write("mine.txt", SECRET.encode())
            sleeping = asyncio.create_task(victim.exec("exec -a victim-of-an-attack sleep 3"))
            await asyncio.sleep(0.3)
            path = f"{node.sandboxes.directory}/{victim.box}"
            script = f"cat {path}/work/mine.txt /workspace/../*/work/mine.txt; echo x > {path}/work/mine.txt; ls {path} {node.sandboxes.directory}"
            result = await attacker.exec(script + "; ps aux; cat /proc/*/cmdline; pkill -9 sleep; kill -9 -1")
            assert SECRET.encode() not in result.out and b"victim-of" not in result.out and victim.box.encode() + b"\n" not in result.out
            assert (await sleeping).rc == 0
            assert await victim.read("mine.txt") == SECRET.encode()

    asyncio.run(look())


# ---------------------------------------------------------------- killing


def test_killing_everything_kills_only_itself(node):
    bystander = subprocess.Popen(["sleep", "30"])
    result = node.attack(
        f"kill -9 {os.getpid()}; kill -9 {bystander.pid}; kill -9 1; pkill -9 -f pytest; pkill -9 -f sandboxd; killall5 -9; kill -9 -1; echo never"
    )
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert result.rc in (0, 137)


def test_what_a_command_leaves_running_ends_with_it(node):
    code = """
        import os, time
        for _ in range(2):  # a daemon by the book
            if os.fork():
                os._exit(0)
            os.setsid()
        for fd in range(3): os.close(fd)
        os.environ.clear()
        time.sleep(60)
    """
    script = f"nohup setsid sleep 61 >/dev/null 2>&1 &\n(setsid nohup sleep 62 &) \n{run_python(code)}\ndisown -a; echo done"
    started = time.monotonic()
    result = node.attack(script, timeout_s=10)
    assert b"done" in result.out and time.monotonic() - started < 9


def test_a_process_outside_cannot_be_traced_or_read(node):
    code = f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        pids = [{os.getpid()}, {os.getppid()}, 1]
        for pid in pids:
            if libc.ptrace(16, pid, 0, 0) == 0: print("TRACED", pid)
            buffer = ctypes.create_string_buffer(8)
            class iovec(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
            local, remote = iovec(ctypes.addressof(buffer), 8), iovec(0x400000, 8)
            if libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0: print("READ", pid)
        print("tried")
    """
    assert node.attack(run_python(code)).out == b"tried\n"


# ---------------------------------------------------------------- the kernel


def test_every_denied_call_is_denied(node):
    column = list(seccomp.AUDIT_ARCH).index(seccomp.machine())
    denied = {name: numbers[column] for name, numbers in (seccomp.DENIED | seccomp.ABSENT).items() if numbers[column] is not None}
    code = f"""
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        for name, number in {denied}.items():
            ctypes.set_errno(0)
            if libc.syscall(number, 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
                print("ALLOWED", name, ctypes.get_errno())
        print("tried")
    """
    assert node.attack(run_python(code)).out == b"tried\n"


def test_no_namespace_inside(node):
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for name, flag in dict(ns=0x20000, user=0x10000000, net=0x40000000, pid=0x20000000, ipc=0x8000000, uts=0x4000000, cgroup=0x2000000).items():
            if libc.unshare(flag) == 0: print("UNSHARED", name)
            if libc.unshare(flag | 0x10000000) == 0: print("UNSHARED user and", name)
            pid = libc.syscall({clone}, flag | 17, 0, 0, 0, 0)
            if pid == 0: os._exit(0)
            if pid > 0: print("CLONED", name)
        print("tried")
    """.replace("{clone}", str(seccomp.CLONE[list(seccomp.AUDIT_ARCH).index(seccomp.machine())]))
    assert node.attack(run_python(code)).out == b"tried\n"
    commands = "unshare -Urm id; unshare -m id; bwrap --dev-bind / / id; chroot / id; mount -t tmpfs x /tmp; su -c id; sudo -n id; nsenter -t 1 -a id; ping -c1 127.0.0.1"
    assert b"uid=0" not in node.attack(commands).out


@pytest.mark.skipif(seccomp.machine() != "x86_64", reason="the other call tables of x86_64")
def test_other_call_tables_are_closed(node):
    code = "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 39)\nprint('survived')"
    assert node.attack(run_python(code)).rc == 128 + 31  # SIGSYS
    machine_code = """
        import ctypes, mmap
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret
        print("survived", ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
    """
    assert node.attack(run_python(machine_code)).rc == 128 + 31


def test_no_privilege_is_held_or_gained(node):
    result = node.attack(
        "cp /bin/sh mine; chmod 6755 mine; ./mine -p -c 'grep -E ^Cap /proc/self/status; id -u'; grep -E 'NoNewPrivs|^Cap(Eff|Prm|Bnd)' /proc/self/status"
    )
    if node.backend == "bwrap":
        assert result.text.count("0000000000000000") >= 5 and "NoNewPrivs:\t1" in result.text
    assert "\n0\n" not in result.text


# ---------------------------------------------------------------- traps for whoever reads from outside


def test_files_that_are_traps(node, bait):
    async def traps():
        async with node.box() as box:
            await box.exec(
                f"ln -s {bait}/secret.txt link; ln -s {bait} folder; ln {bait}/secret.txt hard; ln -s loop loop; mkfifo fifo; mkdir dir; "
                "truncate -s 20M sparse; ln -s /proc/self/environ env; mkdir -m 0 closed; : > -; mkdir deep; ln -s .. deep/up"
            )
            for path in (
                "link",
                "folder/secret.txt",
                "hard",
                "loop",
                "fifo",
                "dir",
                "env",
                "../../../etc/passwd",
                "/etc/passwd",
                "deep/up/link",
                "none",
                "",
                "a\0b",
            ):
                with pytest.raises(FileAccess):
                    await asyncio.wait_for(box.read(path), 5)
            assert len(await box.read("sparse", limit=1000)) == 1000
            for path in ("folder/writable", "folder/new", "/etc/new", "../new", "deep/up/folder/x", "fifo/x", ""):
                with pytest.raises(FileAccess):
                    await asyncio.wait_for(box.write(path, b"changed"), 5)
            await box.write("link", b"a new file")  # replaces the link, does not follow it
            await asyncio.wait_for(box.write("fifo", b"likewise"), 5)
            assert await box.read("link") == b"a new file" and await box.read("fifo") == b"likewise"
            kinds = {entry.name: entry.kind for entry in await box.entries()}
            assert kinds["folder"] == "symlink" and kinds["dir"] == "directory" and kinds["sparse"] == "file"
            with pytest.raises(FileAccess):
                await box.entries("folder")

    asyncio.run(traps())
    assert (bait / "secret.txt").read_text() == SECRET


def test_a_swap_between_look_and_read_finds_nothing(node, bait):
    async def race():
        async with node.box() as box:
            await box.exec("mkdir real && echo fine > real/secret.txt")
            swap = f"while :; do mv real x; ln -s {bait} real; rm real; mv x real; done"
            swapping = asyncio.create_task(box.exec(swap, timeout_s=2))
            while not swapping.done():
                with contextlib.suppress(FileAccess):
                    assert await box.read("real/secret.txt") == b"fine\n"
                with contextlib.suppress(FileAccess):
                    await box.write("real/writable", b"changed")

    asyncio.run(race())


def test_planted_hooks_do_not_run_outside(node, bait):
    evil = f"#!/bin/sh\\necho pwned > {bait}/pwned; echo pwned > /tmp/pwned-by-hook\\n"
    plant = f"""
        git init -q . && printf '{evil}' > evil.sh && chmod +x evil.sh
        for hook in pre-commit post-checkout post-index-change fsmonitor-watchman; do cp evil.sh .git/hooks/$hook; done
        git config core.fsmonitor "$PWD/evil.sh"; git config core.hooksPath "$PWD"; git config diff.external "$PWD/evil.sh"; git config core.pager "$PWD/evil.sh"
        git config filter.x.clean "$PWD/evil.sh"; git config diff.x.textconv "$PWD/evil.sh"; echo '* filter=x diff=x text=auto' > .gitattributes
        cp .git/config .gitconfig; printf '{evil}' > sitecustomize.py; printf 'a\\r\\nb' > crlf.txt; cp evil.sh git; cp evil.sh sh
        mkdir -p nested && cd nested && git init -q . && echo file > file
    """

    async def compare():
        async with node.box() as base:
            await base.write("kept.txt", b"one\n")
            fork = await base.fork()
            await fork.exec(plant)
            await fork.exec("rm kept.txt")
            patch = await fork.diff(base)
            assert b"deleted file mode" in patch and b"+a\r\n" in patch and b"b/evil.sh" in patch and b"b/.git/" not in patch
            copy = await fork.fork()
            assert await copy.diff(fork) == b"" and await base.read("kept.txt") == b"one\n"
            await fork.close()
            await copy.close()
            return patch

    patch = asyncio.run(compare())
    subprocess.run(["git", "apply", "--stat", "-"], input=patch, check=True, stdout=subprocess.DEVNULL)
    assert not os.path.exists("/tmp/pwned-by-hook")


def test_input_cannot_be_made_to_grow(bwrap):
    code = """
        import os
        try:
            fd = os.open("/proc/self/fd/0", os.O_RDWR)
            os.lseek(fd, 0, 2); os.write(fd, b"more")
            print("GREW")
        except OSError:
            print("no")
    """

    async def with_input():
        async with bwrap.box() as box:
            await box.write("grow.py", textwrap.dedent(code).encode())
            return await box.exec([PYTHON, "grow.py"], stdin=b"input")

    assert asyncio.run(with_input()).out == b"no\n"


# ---------------------------------------------------------------- lives and deaths


def test_a_sandbox_outlives_the_thread_that_asked(bwrap):
    made = []

    def ask():
        async def create():
            sandbox = await bwrap.sandboxes.create(SMALL)
            assert (await sandbox.exec("echo kept > file")).rc == 0
            made.append(sandbox)

        asyncio.run(create())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()

    async def go_on():
        assert (await made[0].exec("cat file")).out == b"kept\n"
        await made[0].close()

    asyncio.run(go_on())


TRAINER = """
import asyncio, os, sys
from sao.sandbox.client import Sandboxes
from sao.sandbox.protocol import SandboxSpec
async def main():
    sandboxes = Sandboxes("{backend}", key="{key}")
    await sandboxes.start()
    box = await sandboxes.create(SandboxSpec())
    asyncio.get_running_loop().create_task(box.exec("exec -a {mark} sleep 60; :", timeout_s=60))
    await asyncio.sleep(0.5)
    print(sandboxes.directory, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.parametrize("backend", ["bwrap", "subprocess"])
def test_everything_dies_with_the_trainer(backend):
    mark = f"mark-{secrets.token_hex(6)}"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER.format(backend=backend, key=mark, mark=mark)], stdout=subprocess.PIPE, text=True)
    directory = Path(trainer.stdout.readline().strip())
    assert carrying(mark) and directory.exists()
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 10
    while (carrying(mark) or directory.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not carrying(mark) and not directory.exists()


async def gone(mark):
    deadline = time.monotonic() + 10
    while carrying(mark):
        assert time.monotonic() < deadline, f"processes {carrying(mark)} survived"
        await asyncio.sleep(0.05)


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def carrying(mark):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
    return found


def test_a_killed_daemon_takes_its_sandboxes_along_and_is_replaced():
    async def kill():
        sandboxes = Sandboxes("bwrap", key=f"kill {os.getpid()}")
        await sandboxes.start()
        box = await sandboxes.create(SMALL)
        mark = f"mark-{secrets.token_hex(6)}"
        running = asyncio.create_task(box.exec(f"exec -a {mark} sleep 60"))
        await asyncio.sleep(0.3)
        answer, _ = await sandboxes.ask({"ask": "hello"})
        os.kill(answer["pid"], 9)
        with pytest.raises(SandboxFailure, match="sandboxd ended"):
            await running
        with pytest.raises(SandboxFailure):
            await box.exec("true")
        await box.close()
        await gone(mark)
        again = await sandboxes.create(SMALL)
        assert (await again.exec("echo well")).out == b"well\n"
        await sandboxes.end()

    asyncio.run(kill())


def test_a_client_that_hangs_up_cancels_its_command(node):
    async def hang_up():
        async with node.box() as box:
            mark = f"mark-{secrets.token_hex(6)}"
            running = asyncio.create_task(box.exec(["/bin/sh", "-c", f"sleep 60; : {mark}"]))
            await asyncio.sleep(0.4)
            assert carrying(mark)
            running.cancel()
            await gone(mark)
            assert (await box.exec("echo well")).out == b"well\n"

    asyncio.run(hang_up())


def test_sandboxes_of_a_client_that_died_are_closed(bwrap):
    code = f"""
import asyncio
from sao.sandbox.client import Sandboxes
from sao.sandbox.protocol import SandboxSpec
sandboxes = Sandboxes("bwrap", key="attacks {os.getpid()}")
print(asyncio.run(sandboxes.create(SandboxSpec())).box)
"""
    box = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    async def wait():
        orphan = RemoteSandbox(bwrap.sandboxes, box, SMALL)
        async with asyncio.timeout(10):
            while True:
                try:
                    await orphan.exec("true")
                except SandboxFailure:
                    return
                await asyncio.sleep(0.2)

    asyncio.run(wait())


@pytest.mark.long
def test_a_thousand_sandboxes_leave_nothing(bwrap):
    async def churn():
        daemon = (await bwrap.sandboxes.ask({"ask": "hello"}))[0]["pid"]
        before = os.listdir(f"/proc/{daemon}/fd")
        for _ in range(1000):
            async with bwrap.box() as box:
                assert (await box.exec("(setsid sleep 100 &); echo x > f")).rc == 0
        await asyncio.sleep(0.5)
        assert not children_of(daemon) and len(os.listdir(f"/proc/{daemon}/fd")) == len(before)
        assert sorted(p.name for p in bwrap.sandboxes.directory.iterdir()) == ["alive", "etc", "filter-0.bpf", "sandboxd.log", "socket"]

    asyncio.run(churn())
