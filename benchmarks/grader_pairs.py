r"""Answers, gold answers and the right verdict, written by hand for `benchmarks/graders.py`. One a line: answer || gold || verdict, under the kind of pair."""

from __future__ import annotations

TABLE = r"""
# integers
42 || 42 || correct
042 || 42 || correct
42.0 || 42 || correct
42. || 42 || correct
$42$ || 42 || correct
\boxed{42} || 42 || correct
+42 || 42 || correct
-42 || 42 || wrong
− 42 || -42 || correct
1,234 || 1234 || correct
1{,}234 || 1234 || correct
1\,234 || 1234 || correct
1234567890123456789012345678901 || 1234567890123456789012345678900 || wrong
42^\circ || 42 || correct
42\text{ cm} || 42 || correct
\text{42} || 42 || correct
x=42 || 42 || correct
4 2 || 42 || unparseable
2^{10} || 1024 || correct
2^{10} || 1023 || wrong
5! || 120 || correct
\binom{10}{3} || 120 || correct
0 || -0 || correct
forty-two || 42 || unparseable
# rationals
\frac{1}{2} || 0.5 || correct
\frac12 || \dfrac{1}{2} || correct
1/2 || \frac{2}{4} || correct
-\frac{3}{4} || \frac{-3}{4} || correct
\frac{3}{4} || \frac{4}{3} || wrong
0.333 || \frac{1}{3} || wrong
0.\overline{3} || \frac{1}{3} || correct
0.1\overline{6} || \frac{1}{6} || correct
0.\overline{142857} || 1/7 || correct
2\frac{1}{2} || \frac{5}{2} || correct
2\frac{1}{2} || 1 || wrong
\frac{1}{10000001} || \frac{1}{10000000} || wrong
10^{-30} || 0 || wrong
10^{-9} || 0.000000001 || correct
1.0000001 || 1 || wrong
5\% || 0.05 || correct
5\% || 5 || wrong
5 || 5\% || wrong
12.5\% || \frac{1}{8} || correct
1/0 || 1 || wrong
\frac{1}{2}+\frac{1}{3} || \frac{5}{6} || correct
3.14 || \frac{22}{7} || wrong
# irrational numbers
\sqrt{8} || 2\sqrt{2} || correct
\sqrt8 || 2\sqrt2 || correct
\sqrt{8} || 2.828 || wrong
\frac{1}{\sqrt{2}} || \frac{\sqrt{2}}{2} || correct
\frac{\sqrt{6}+\sqrt{2}}{4} || \cos 15^\circ || correct
\sin 30^\circ || \frac{1}{2} || correct
\sin\frac{\pi}{6} || \frac12 || correct
2\pi || 6.28 || wrong
\pi || \frac{22}{7} || wrong
\pi || 3.14159265358979323846264338327950288 || wrong
1-\frac{1}{e} || 1+\frac{1}{e} || wrong
1-\frac1e || 1-e^{-1} || correct
1-1/e || \frac{e-1}{e} || correct
e^{\ln 5} || 5 || correct
\ln 8 || 3\ln 2 || correct
\log_2 8 || 3 || correct
\log_{10} 1000 || 3 || correct
\sqrt[3]{27} || 3 || correct
\sqrt[3]{2} || \sqrt{2} || wrong
\sqrt{2}+10^{-30} || \sqrt{2} || wrong
\sqrt{3+2\sqrt{2}} || 1+\sqrt{2} || correct
\tan^{-1}(1) || \frac{\pi}{4} || correct
sqrt(2)/2 || \frac{\sqrt{2}}{2} || correct
2*sqrt(3) || \sqrt{12} || correct
(1+\sqrt{5})/2 || \frac{1+\sqrt5}{2} || correct
(1-\sqrt{5})/2 || \frac{1+\sqrt5}{2} || wrong
i^2 || -1 || correct
(1+i)^2 || 2i || correct
3+4i || 3-4i || wrong
e^{i\pi} || -1 || correct
\infty || \infty || correct
-\infty || \infty || wrong
\infty || 1000000 || wrong
# expressions
x^2+2x+1 || (x+1)^2 || correct
(x+1)^2 || x^2+1 || wrong
x(x+1) || x^2+x || correct
\frac{x^2-1}{x-1} || x+1 || correct
\frac{n(n+1)}{2} || \sum_{k=1}^{n} k || correct
\frac{n(n-1)}{2} || \frac{n(n+1)}{2} || wrong
2^{n+1} || 2\cdot 2^n || correct
\sin^2 x+\cos^2 x || 1 || correct
\sin(2x) || 2\sin x\cos x || correct
\sqrt{x^2} || |x| || correct
\sqrt{x^2} || x || wrong
a^2-b^2 || (a-b)(a+b) || correct
a-b || b-a || wrong
f(x)=x^2+1 || x^2+1 || correct
y=2x+1 || 2x+1 || correct
2x+y=7 || y=7-2x || correct
2x+y=7 || 4x+2y=14 || correct
2x+y=7 || 2x+y=8 || wrong
x^2+y^2=4 || x^2+y^2-4=0 || correct
2\times 10^3 || 2000 || correct
x_1+x_2 || x_2+x_1 || correct
x_1 || x_2 || wrong
\begin{pmatrix}1&2\\3&4\end{pmatrix} || \begin{pmatrix}1&2\\3&4\end{pmatrix} || correct
\begin{pmatrix}1&2\\3&4\end{pmatrix} || \begin{pmatrix}1&3\\2&4\end{pmatrix} || wrong
\begin{pmatrix}\frac12\\0\end{pmatrix} || \begin{pmatrix}0.5\\0\end{pmatrix} || correct
# sets and lists
\{1,2\} || \{2,1\} || correct
\{1,2\} || \{1,2,3\} || wrong
\{1,2\} || \{1,3\} || wrong
\{1,1,2\} || \{1,2\} || correct
1, 2 || \{1,2\} || correct
1, 2 || 2,1 || correct
1 \text{ or } 2 || 2, 1 || correct
1 and 2 || 1,2 || correct
x=1 \text{ or } x=2 || \{1,2\} || correct
x=1, x=2 || 1,2 || correct
2\pm\sqrt{3} || 2+\sqrt{3}, 2-\sqrt{3} || correct
\pm 3 || -3, 3 || correct
\pm 3 || 3 || wrong
\{\frac12,\sqrt4\} || \{2, 0.5\} || correct
\emptyset || \{\} || correct
\emptyset || \{0\} || wrong
\{5\} || 5 || correct
\boxed{1}, \boxed{2} || \{1,2\} || wrong
\boxed{1}, \boxed{2} || 2 || correct
\{1,2\} || (1,2) || wrong
\{(1,2),(3,4)\} || (3,4),(1,2) || correct
\{(1,2),(3,4)\} || \{(2,1),(3,4)\} || wrong
# points and intervals
(1,2) || (1, 2) || correct
(1,2) || (2,1) || wrong
(1,2) || [1,2] || wrong
[1,2) || [1,2] || wrong
[1,2) || \left[1,2\right) || correct
[1,2] || \{1,2\} || wrong
(1,2,3) || (1,2,3) || correct
(1,2,3) || (1,2) || wrong
(\frac12, \sqrt{4}) || (0.5, 2) || correct
(3, \frac{\pi}{2}) || \left( 3, \frac{\pi}{2} \right) || correct
1<x<2 || (1,2) || correct
1 \le x < 2 || [1,2) || correct
2 > x \ge 1 || [1,2) || correct
x>3 || (3,\infty) || correct
x\geq 3 || (3,\infty) || wrong
x \in [-1,1] || [-1,1] || correct
(-\infty,3)\cup[5,\infty) || [5,\infty)\cup(-\infty,3) || correct
(-\infty,3)\cup[5,\infty) || (-\infty,3)\cup(5,\infty) || wrong
[1,2]\cup[2,3] || [1,3] || correct
(-\infty,\infty) || \mathbb{R} || correct
[0.5,1] || [\frac12,1] || correct
# formatting
\text{Tuesday} || \text{tuesday} || correct
\text{A} || \text{B} || wrong
\text{(C)} || (C) || correct
$\frac{1}{2}$ || \frac{1}{2} || correct
\( \frac{1}{2} \) || \frac{1}{2} || correct
\displaystyle \frac{1}{2} || \frac{1}{2} || correct
\tfrac{\sqrt{3}}{2} || \frac{\sqrt{3}}{2} || correct
\left(x+1\right)^2 || (x+1)^2 || correct
12 cm^2 || 12 || correct
1011_2 || 1011_2 || correct
1011_2 || 11 || correct
1011_2 || 1011 || wrong
\$5 || 5 || correct
3 : 4 || \frac{3}{4} || correct
The answer is \boxed{\frac{1}{2}}. || 0.5 || correct
<think>\boxed{3}</think> \boxed{4} || 4 || correct
<think>\boxed{4}</think> \boxed{3} || 4 || wrong
\boxed{\boxed{7}} || 7 || correct
\boxed{7 || 7 || unparseable
\boxed{} || 7 || unparseable
|| 7 || unparseable
# adversarial
2^{2^{2^{2^{2}}}} || \sqrt{2} || unparseable
9^{9^{9^{9}}} || \sqrt{2} || unparseable
((((((((((((((((((((((((((((((((((((((((((1)))))))))))))))))))))))))))))))))))))))))) || \sqrt{2} || unparseable
99999999999! || \sqrt{2} || unparseable
(5!)! || \sqrt{2} || unparseable
(1,2 || (1,2) || unparseable
\frac{1}{ || \sqrt{2} || unparseable
\sqrt{2} or maybe not || \sqrt{2} || wrong
\sqrt{2} \sqrt{2} || \sqrt{2} || wrong
1 = 1 = \sqrt{2} || \sqrt{2} || unparseable
__import__('os').system('true') || \sqrt{2} || wrong
\sqrt{2} \text{ or } \sqrt{3} || \sqrt{2} || wrong
\{\sqrt{2}, 1, 2, 3\} || \sqrt{2} || wrong
x || \sqrt{2} || wrong
\sqrt{2}x || \sqrt{2} || wrong
\frac{0}{0} || \sqrt{2} || wrong
\sqrt{2}^{\circ} || \sqrt{2} || correct
"""

# What must end in bounded time, whatever the verdict: sympy or the reader of expressions would compute for minutes.
BOMBS = [
    r"\sum_{k=1}^{n^{9}} \frac{1}{k^{3}}+\int_0^1 \frac{\tan x^{7}}{\sqrt{1+x^{5}}} dx",
    r"(2^{9999})^{9999}+\sqrt{3}",
    r"\binom{999999999}{499999999}",
    "1+" * 900 + "1",
    r"\frac{" * 30 + "1" + "}{2}" * 30,
    r"\sqrt{" * 35 + "2" + "}" * 35,
    r"\int_0^1 e^{-x^2}\sin(\cos(x))\sqrt{x+\tan x} dx",
    r"(x+y+z+w+1)^{999}-(x+y+z+w+2)^{998}",
]


def pairs() -> list[tuple[str, str, str, str]]:
    """(kind, answer, gold, verdict)"""
    found, kind = [], ""
    for line in TABLE.strip().splitlines():
        if line.startswith("# "):
            kind = line[2:]
            continue
        answer, gold, verdict = ([""] * 3 + [part.strip() for part in line.split("||")])[-3:]
        found.append((kind, answer, gold, verdict))
    return found
