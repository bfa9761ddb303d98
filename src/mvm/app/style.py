"""The style of the page: blue and vermilion for ODE and SDE, sharp pixels, one column on a narrow screen."""

CSS = """
.gradio-container { max-width: 1280px !important; margin: 0 auto !important; }
.mvm-controls { flex: 0 1 300px !important; gap: 10px !important; }
.mvm-results { flex: 1 1 600px !important; min-width: 0 !important; gap: 8px !important; }
.mvm-number, .mvm-number > * { background: var(--block-background-fill) !important; }
.mvm-slider { padding: 0 12px 8px !important; }
.mvm-slider input[type="number"], .mvm-slider .head { display: none !important; }
:is(#mvm-problem, #mvm-plane-problem, .mvm-beside):not(:has(.mvm-problem)) { display: none !important; }
.mvm-beside { padding: 0 !important; font-size: 13px; }
.mvm-problem { border-left: 4px solid #d55e00; padding: 8px 12px; margin: 0; background: rgba(213, 94, 0, 0.1); }

.mvm-side { border-top: 4px solid #0072b2; padding-top: 8px; }
.mvm-side.sde { border-top-color: #d55e00; }
.mvm-side h3, .mvm-side h4 { margin: 4px 0 8px; font-weight: 600; }
.mvm-side h3 small { font-weight: 400; margin-left: 6px; }
.mvm-pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(88px, 1fr)); gap: 8px; }
.mvm-pictures figure { margin: 0; }
.mvm-pictures img { width: 100%; image-rendering: pixelated; display: block; }
.mvm-pictures figcaption { font-size: 12px; overflow-wrap: anywhere; }
.mvm-state { min-height: 34px; margin: 8px 0 !important; }

.mvm-path { overflow-x: auto; }
.mvm-path :is(table, tr, th, td), .mvm-figures :is(table, tr, th, td) { border: 0 !important; }
.mvm-path :is(th, td) { padding: 1px !important; font-size: 10px; font-weight: 400; text-align: center; }
.mvm-path th { text-align: left; padding-right: 6px !important; }
.mvm-path img { width: 30px; min-width: 30px; image-rendering: pixelated; display: block; margin: 0 !important; }

.mvm-figures table { border-collapse: collapse; margin: 0 0 8px !important; }
.mvm-figures :is(th, td) { padding: 2px 0 2px 20px !important; text-align: right; font-variant-numeric: tabular-nums; }
.mvm-figures :is(th, td):first-child { text-align: left; font-weight: 400; padding-left: 0 !important; }
.mvm-figures td { white-space: nowrap; }
.mvm-figures tr:first-child :is(th, td) { border-bottom: 1px solid var(--border-color-primary) !important; }

.mvm-save { display: inline-block; padding: 3px 12px; border: 1px solid currentColor; border-radius: 6px; }
.mvm-save, .mvm-save:hover { text-decoration: none !important; }
.mvm-state .mvm-save { margin-left: 8px; }

.mvm-frame { display: flex; flex-wrap: wrap; gap: 12px; }
.mvm-frame[hidden] { display: none; }
.mvm-frame img { flex: 0 1 400px; min-width: 260px; max-width: 100%; background: white; margin: 0 !important; }
.mvm-film label { display: flex; gap: 10px; align-items: center; max-width: 812px; margin: 8px 0; }
.mvm-film input { flex: 1; }

@media (max-width: 700px) {
  .mvm-figures :is(th, td) { padding-left: 12px !important; font-size: 13px; }
  .mvm-path, .mvm-figures { max-width: calc(100vw - 96px); overflow-x: auto; }
  .mvm-body, .mvm-pair { flex-direction: column !important; }
  .mvm-body > *, .mvm-pair > * { flex: 0 0 auto !important; width: 100% !important; min-width: 0 !important; }
}
"""
