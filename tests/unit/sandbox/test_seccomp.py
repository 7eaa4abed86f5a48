"""The filter, run by an interpreter of classic BPF for both machines; tests/integration/test_sandbox_attacks.py asks the kernel."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao.sandbox import seccomp

MACHINES = list(seccomp.AUDIT_ARCH)
CALLS = seccomp.DENIED | seccomp.ABSENT


def verdict(code, number, arguments=(0, 0), arch=None, machine="x86_64"):
    """What the kernel would decide: struct seccomp_data is nr, arch, instruction pointer, six 64-bit arguments."""
    arch = seccomp.AUDIT_ARCH[machine] if arch is None else arch
    data = struct.pack("<IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator, at = 0, 0
    while True:
        operation, yes, no, value = struct.unpack_from("<HBBI", code, at * 8)
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == 0x06:
            return value
        else:
            hit = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[operation]
            at += yes if hit else no


def refused(code):
    return seccomp.ERRNO | code


@pytest.mark.parametrize("machine", MACHINES)
def test_every_listed_call_is_refused(machine):
    code = seccomp.program(machine, network=True)
    column = MACHINES.index(machine)
    for name, numbers in CALLS.items():
        if numbers[column] is not None:
            expected = errno.ENOSYS if name in seccomp.ABSENT else errno.EPERM
            assert verdict(code, numbers[column], machine=machine) == refused(expected), name


@given(st.integers(0, 600), st.sampled_from(MACHINES))
def test_every_other_call_is_allowed(number, machine):
    column = MACHINES.index(machine)
    special = {numbers[column] for numbers in [*CALLS.values(), seccomp.CLONE, seccomp.SOCKET, seccomp.IOCTL]}
    if number not in special:
        assert verdict(seccomp.program(machine, network=False), number, machine=machine) == seccomp.ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_another_machine_s_calls_kill(machine):
    code = seccomp.program(machine, network=False)
    for arch in (0x40000003, 0x40000028, *(value for name, value in seccomp.AUDIT_ARCH.items() if name != machine)):
        assert verdict(code, 0, arch=arch) == seccomp.KILL_PROCESS


@given(st.integers(0x40000000, 0xFFFFFFFF))
def test_x32_kills(number):
    assert verdict(seccomp.program("x86_64", network=False), number) == seccomp.KILL_PROCESS


@given(st.integers(0, 2**32 - 1), st.sampled_from(MACHINES))
def test_clone_is_refused_exactly_with_a_namespace(flags, machine):
    code, number = seccomp.program(machine, network=False), seccomp.CLONE[MACHINES.index(machine)]
    assert verdict(code, number, (flags,), machine=machine) == (refused(errno.EPERM) if flags & seccomp.NEW_NAMESPACE else seccomp.ALLOW)


@pytest.mark.parametrize(("network", "unix", "allowed"), [(False, True, {1, 16}), (True, True, {1, 2, 10, 16}), (False, False, {16})])
def test_families_of_sockets(network, unix, allowed):
    code = seccomp.program("x86_64", network=network, unix=unix)
    for family in range(64):
        assert verdict(code, 41, (family,)) == (seccomp.ALLOW if family in allowed else refused(errno.EAFNOSUPPORT))


def test_input_is_not_pushed_into_a_terminal():
    code = seccomp.program("x86_64", network=False)
    assert [verdict(code, 16, (0, request)) == seccomp.ALLOW for request in (0x5412, 0x541C, 0x5401)] == [False, False, True]
