// SPDX-License-Identifier: MIT
// The page: style, header, table of contents, and the section of all runs.
#include <fmt/core.h>

#include <map>

#include "report/plot.h"
#include "report/sections.h"
#include "report/text.h"

namespace coterie::train {

namespace {

const char* const kStyle = R"css(
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #16181d; --soft: #5d6470;
--rule: #e2e5ea; --mark: #fff3d6; --link: #0b57a4; }
@media (prefers-color-scheme: dark) { :root { --page: #111317; --card: #1a1d23; --ink: #e8eaee;
--soft: #9aa2af; --rule: #2c313a; --mark: #453410; --link: #7ab8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 15px; }
main, header { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 36px; } header p { color: var(--soft); margin: 4px 0 0; overflow-wrap: anywhere; }
h1 { font-size: 30px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 22px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h3 { font-size: 15px; margin: 26px 0 10px; }
section { margin: 44px 0; } a { color: var(--link); text-underline-offset: 2px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 16px; padding: 12px 0; border-top: 1px solid var(--rule);
border-bottom: 1px solid var(--rule); } nav a { text-decoration: none; overflow-wrap: anywhere; }
.lede { color: var(--soft); margin: 0 0 16px; max-width: 76ch; }
.note { color: var(--soft); font-size: 13px; margin: 8px 0 0; }
.missing { color: var(--soft); border: 1px dashed var(--soft); border-radius: 8px; padding: 12px 16px; overflow-wrap: anywhere; }
.summary { margin: 12px 0 0; padding: 0; list-style: none; display: grid; gap: 10px; }
.summary li { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 16px;
overflow-wrap: anywhere; } .summary b { font-variant-numeric: tabular-nums; }
.figures { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 360px), 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 12px 14px; min-width: 0; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px; overflow-wrap: anywhere; }
figure img { max-width: 100%; image-rendering: pixelated; }
figure small { color: var(--soft); display: block; margin-top: 4px; font-size: 12px; }
.heads { display: grid; gap: 10px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 128px), 1fr)); margin: 12px 0; }
.heads figcaption { font-weight: 400; font-size: 12px; color: var(--soft); }
.heads figure { padding: 8px 10px; }
.table { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; margin-top: 14px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: left; border-top: 1px solid var(--rule); vertical-align: baseline; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; vertical-align: bottom; }
th.n, td.n { text-align: right; } td.n { white-space: nowrap; }
.key > span, td > code { display: inline-block; min-width: 140px; }
tbody tr:hover { background: var(--page); }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px; }
code { overflow-wrap: anywhere; }
pre { background: var(--page); border: 1px solid var(--rule); border-radius: 6px; padding: 12px; overflow-x: auto; margin: 12px 0 0; }
.warning { background: var(--mark); border-left: 4px solid #c43; border-radius: 4px; padding: 8px 12px; }
figure.collapsed { outline: 2px solid #c43; outline-offset: 4px; border-radius: 4px; }
figure.collapsed small, td .collapsed { color: #c43; font-weight: 600; }
.badge { background: var(--mark); border-radius: 4px; padding: 1px 6px; font-size: 12px; white-space: nowrap; }
details { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 0 16px; margin-top: 10px; }
details[open] { padding-bottom: 16px; }
summary { cursor: pointer; padding: 10px 0; overflow-wrap: anywhere; }
svg.swatch { display: inline-block; flex: none; width: 22px; height: 8px; margin-right: 8px; vertical-align: middle; }
.beside { display: grid; gap: 14px; margin-top: 14px; align-items: start; } .beside .table { margin-top: 0; }
@media (min-width: 1000px) { .beside { grid-template-columns: repeat(3, minmax(0, 1fr)); }
.beside .table { grid-column: span 2; } }
.key { display: flex; align-items: center; }
dl { display: grid; gap: 6px 24px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 220px), 1fr)); margin: 12px 0 0; }
dt { color: var(--soft); font-size: 12px; } dd { margin: 0; overflow-wrap: anywhere; font-size: 13.5px; }
footer { color: var(--soft); font-size: 13px; border-top: 1px solid var(--rule); padding: 16px 0 40px; }
@media (max-width: 600px) { main, header { padding: 0 12px; } header { padding-top: 20px; } h1 { font-size: 24px; }
section { margin: 32px 0; } figure { padding: 10px; } th, td { padding: 6px 9px; } details { padding: 0 12px; } }
)css";

std::string run_html(const RunLog& run) {
  Facts facts = {{"task", run.task},
                 {"attention", run.attention},
                 {"state", state_text(run)},
                 {"started", run.date.empty() ? "unknown" : run.date},
                 {"seed", std::to_string(run.seed)}};
  facts.insert(facts.end(), run.machine.begin(), run.machine.end());
  std::string content = facts_html(facts);
  content += run.config.empty() ? "<p class=\"missing\">The log contains no config.</p>\n"
                                : "<pre>" + escape(run.config) + "</pre>\n";
  if (run.unreadable > 0) {
    content += fmt::format("<p class=\"missing\">{} of the log could not be read.</p>\n",
                           counted(run.unreadable, "line"));
  }
  return folded("<b>" + escape(run.task) + "</b> " + attention_html(run.attention) +
                    " <span class=\"note\">" + escape(run.folder) + "</span>",
                content);
}

}  // namespace

std::string figure_html(const std::string& title, const std::string& picture,
                        const std::string& note, bool collapsed) {
  return fmt::format("<figure{}><figcaption>{}</figcaption>{}{}</figure>\n",
                     collapsed ? " class=\"collapsed\"" : "", escape(title), picture,
                     note.empty() ? "" : "<small>" + escape(note) + "</small>");
}

std::string figures_html(const std::vector<std::string>& figures) {
  std::string html = "<div class=\"figures\">";
  for (const std::string& figure : figures) html += figure;
  return html + "</div>\n";
}

std::string swatch_html(int colour, int dash) {
  return fmt::format(
      "<svg class=\"swatch\" viewBox=\"0 0 22 8\" aria-hidden=\"true\"><path "
      "d=\"M1 4H21\" class=\"curve c{} d{}\"/></svg>",
      colour, dash % 4);
}

std::string attention_html(const std::string& attention) {
  std::string code;
  for (const char letter : attention) {
    code += escape({&letter, 1});
    if (letter == ',' || letter == '+' || letter == '(') code += "<wbr>";  // where to break a line
  }
  return "<code>" + code + "</code>";
}

std::string key_html(int colour, int dash, const std::string& attention, const std::string& badge) {
  return fmt::format("<span class=\"key\">{}<span>{}{}</span></span>", swatch_html(colour, dash),
                     attention_html(attention),
                     badge.empty() ? "" : " <span class=\"badge\">" + escape(badge) + "</span>");
}

std::string state_text(const RunLog& run) {
  if (!run.end) return "unfinished";
  if (run.end->reason == "steps") return "finished";
  if (run.end->reason == "patience") return "stopped early";
  return run.end->reason.empty() ? "ended" : run.end->reason;
}

std::string runs_section(const ReportData& data) {
  std::string html = "<section id=\"runs\"><h2>Runs and machines</h2>\n";
  if (data.runs.empty()) html += "<p class=\"missing\">No runs were given.</p>\n";
  for (const RunLog& run : data.runs) html += run_html(run);
  return html + "</section>\n";
}

std::string page_html(const std::string& title, const std::string& subtitle,
                      const std::vector<PageSection>& sections) {
  std::string links, content;
  for (const PageSection& section : sections) {
    links += fmt::format("<a href=\"#{}\">{}</a>\n", section.id, escape(section.name));
    content += section.html;
  }
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{0}</title>\n<style>{1}{2}</style></head>\n<body>\n"
      "<header><h1>{0}</h1><p>{3}</p>\n<nav>{4}</nav></header>\n<main>\n{5}"
      "<footer>Made by coterie report; this file is self-contained.</footer>\n"
      "</main></body></html>\n",
      escape(title), kStyle, plot_style(), escape(subtitle), links, content);
}

}  // namespace coterie::train
