// SPDX-License-Identifier: MIT
#include "report/plot_svg.h"

#include <fmt/core.h>

#include <cmath>

#include "report/plot.h"
#include "report/text.h"

namespace coterie::train {

double text_width(std::string_view text) {
  double width = 0;
  for (const char letter : text) {
    if ((static_cast<unsigned char>(letter) & 0xc0) == 0x80) continue;  // within a character
    const bool narrow =
        std::string_view("iljtrf.,:;()'|! -").find(letter) != std::string_view::npos;
    const bool wide = std::string_view("mwMW%@").find(letter) != std::string_view::npos;
    width += narrow ? 4.2 : wide ? 10.2 : 7.0;
  }
  return width;
}

std::string number(double value) { return fmt::format("{:.6g}", std::round(10 * value) / 10); }

std::string svg_text(double x, double y, const char* classes, std::string_view text) {
  return fmt::format("<text x=\"{}\" y=\"{}\" class=\"{}\">{}</text>", number(x), number(y),
                     classes, escape(text));
}

std::string svg_line(double x1, double y1, double x2, double y2, const std::string& classes) {
  return fmt::format("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" class=\"{}\"/>", number(x1),
                     number(y1), number(x2), number(y2), classes);
}

std::string svg_picture(double height, std::string_view title, const std::string& content) {
  return fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">{}</svg>\n",
                     number(kPlotWidth), number(height), escape(title), content);
}

// The colours of Okabe and Ito, which colour-blind readers can distinguish; lighter ones of the
// same hues on dark pages.
std::string plot_style() {
  return R"css(
svg { display: block; width: 100%; height: auto; overflow: hidden; font-size: 11px; }
svg text { fill: var(--soft); } svg .end { text-anchor: end; } svg .mid { text-anchor: middle; }
svg .name { fill: var(--ink); } svg .strong { font-weight: 600; }
svg .grid { stroke: var(--rule); } svg .axis { stroke: var(--soft); }
svg .level { stroke: var(--soft); stroke-dasharray: 2 4; }
svg .lead { stroke: var(--c); stroke-width: 0.75; opacity: 0.55; fill: none; }
svg .curve { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .d1 { stroke-dasharray: 7 4; } svg .d2 { stroke-dasharray: 2 4; } svg .d3 { stroke-dasharray: 9 3 2 3; }
svg .dot { fill: var(--c); stroke: var(--card); stroke-width: 1.5; } svg .bar, svg .mark { fill: var(--c); }
svg .none { fill: none; stroke: var(--rule); stroke-dasharray: 3 3; }
.c0 { --c: var(--ink); } .c1 { --c: #56b4e9; } .c2 { --c: #8a8f98; } .c3 { --c: #b59f00; } .c4 { --c: #e69f00; }
.c5 { --c: #0072b2; } .c6 { --c: #cc79a7; } .c7 { --c: #009e73; } .c8 { --c: #d55e00; }
@media (prefers-color-scheme: dark) {
.c2 { --c: #9aa0aa; } .c3 { --c: #f0e442; } .c5 { --c: #4da3ff; } .c7 { --c: #2fc79a; } .c8 { --c: #ff7f3f; }
}
)css";
}

}  // namespace coterie::train
