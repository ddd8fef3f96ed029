// The connection to the server: it tells which runs have changed, and the page asks for what it lacks.
"use strict";

const Live = {
  source: null,
  signatures: {}, // by run, of what the server has
  known: {}, // by run, of what the page has
  reading: new Map(),
  failures: 0,
  retry: null,
  silence: null,

  start() {
    clearTimeout(Live.retry);
    clearInterval(Live.countdown);
    Live.source?.close();
    const source = (Live.source = new EventSource("changes"));
    const heard = () => {
      clearTimeout(Live.silence);
      Live.silence = setTimeout(Live.lost, 30000); // it speaks every ten seconds
    };
    heard();
    source.onmessage = (event) => {
      heard();
      if (Live.failures) Live.known = {}; // the server may be another one
      Live.failures = 0;
      Live.say("live", "Live");
      Live.signatures = JSON.parse(event.data);
      Live.update();
    };
    source.addEventListener("alive", heard);
    source.onerror = Live.lost;
  },

  /** The server is gone: keep what the page has and try again, ever more rarely. */
  lost() {
    Live.source?.close();
    clearTimeout(Live.silence);
    clearTimeout(Live.retry);
    clearInterval(Live.countdown);
    Live.failures += 1;
    let wait = Math.min(15, 2 ** (Live.failures - 1));
    const tell = () => Live.say("lost", `The server does not answer; this is its last state. Trying again in ${wait} s.`);
    tell();
    Live.countdown = setInterval(() => {
      wait = Math.max(0, wait - 1);
      tell();
    }, 1000);
    Live.retry = setTimeout(Live.start, 1000 * wait);
  },

  say(kind, text) {
    const place = document.getElementById("connection");
    place.className = kind;
    if (place.textContent !== text) place.textContent = text;
  },

  async update() {
    if (Live.listing) {
      Live.again = true;
      return;
    }
    Live.listing = true;
    try {
      const answer = await ask("runs");
      Store.folders = answer.folders;
      Store.reading = false;
      takeList(answer.runs, answer.named);
      draw();
      await Promise.all(Store.runs.filter((run) => run.shown).map(Live.read));
    } catch (error) {
      if (error.status) Live.say("lost", `The server cannot list the runs (HTTP ${error.status}); its terminal says why.`);
      else Live.lost();
    }
    Live.listing = false;
    if (Live.again) {
      Live.again = false;
      Live.update();
    }
  },

  /** Ask for the sections of a run that the page lacks; one question at a time, so that none is answered twice. */
  async read(run) {
    const wanted = Live.signatures[run.key];
    if (wanted === undefined || (Live.known[run.key] === wanted && run.tags.metrics) || Live.reading.get(run.key)) return;
    Live.reading.set(run.key, true);
    try {
      do {
        takeSections(run, await ask(`runs/${run.key}?have=${encodeURIComponent(JSON.stringify(run.tags))}`));
        draw();
      } while (run.reading);
      Live.known[run.key] = wanted;
    } catch (error) {
      Live.failed(run, error);
    } finally {
      Live.reading.delete(run.key);
    }
  },

  /** An answer that says no is of this run alone; none at all means that the server is gone. */
  failed(run, error) {
    if (!error.status) return Live.lost();
    if (error.status === 404) return; // the run has been deleted, as the next list says
    run.unreadable = `cannot be read (HTTP ${error.status}); the terminal of the server says why`;
    draw();
  },
};

async function ask(address) {
  const answer = await fetch(address, { cache: "no-store" });
  if (!answer.ok) throw Object.assign(new Error(address), { status: answer.status });
  return answer.json();
}
